"""What a client sees of a server with a real model: OpenAI's own client, streamed or not, hits, choices, seeds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from e2e_server import CHAT, COMPLETIONS, Server, chat_body, fresh, text_of

QUESTION = "Tell me about the sea, in two sentences."


def test_openai_s_client_streams_what_it_gets_unstreamed(server: Server) -> None:
    """Temperature 0; the usage is the same, too, but for what the first of the two left in the cache."""
    messages: Any = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": fresh(QUESTION)}]
    with server.client() as client:
        whole = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=32)
        again = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=32)
        with client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=32,
                                            stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
    text = whole.choices[0].message.content
    assert text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert again.choices[0].message.content == text
    finish = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finish == [whole.choices[0].finish_reason]
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert whole.usage is not None
    assert again.usage is not None
    assert chunks[-1].usage == again.usage  # PITFALLS 12
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens
    assert again.usage.completion_tokens == whole.usage.completion_tokens == 32 or finish == ["stop"]


def test_the_second_of_two_equal_requests_is_a_hit_with_the_same_text(server: Server) -> None:
    question = fresh(QUESTION)
    first = server.chat(question, max_tokens=20)
    second = server.chat(question, max_tokens=20)
    assert second.body["choices"] == first.body["choices"]
    prompt = first.usage["prompt_tokens"]
    assert second.cached == prompt - 1
    assert second.usage["cache"] == {"cached": {"hbm": prompt - 1}, "computed": {"last_token": 1}}
    # the first has only the template's own head from others
    assert first.cached < prompt / 2


def test_a_second_turn_finds_the_first_and_its_answer(server: Server) -> None:
    messages = [{"role": "user", "content": fresh(QUESTION)}]
    first = server.ask(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 24})
    said = first.body["choices"][0]["message"]
    second = server.ask(CHAT, {"messages": [*messages, said, {"role": "user", "content": "And the moon?"}],
                               "temperature": 0, "max_tokens": 4})
    # all of the first prompt, and most of its answer: re-tokenising may part ways with what was sampled
    assert second.cached >= first.usage["prompt_tokens"]


def test_three_choices_count_their_prompt_once(server: Server) -> None:
    question = fresh("Name a colour.")
    one = server.chat(question, max_tokens=6)
    many = server.chat(question, n=3, max_tokens=6, temperature=1, seed=5, ignore_eos=True)
    assert [c["index"] for c in many.body["choices"]] == [0, 1, 2]
    assert many.usage["prompt_tokens"] == one.usage["prompt_tokens"]
    assert many.usage["completion_tokens"] == 18
    with_stream = server.open(CHAT, chat_body(question, n=3, max_tokens=6, temperature=1, seed=5,
                                              ignore_eos=True))
    events = with_stream.rest()
    with_stream.leave()
    assert [text_of(events, i) for i in range(3)] == [c["message"]["content"] for c in many.body["choices"]]
    assert len({text_of(events, i) for i in range(3)}) > 1  # each has a seed of its own


def test_completions_of_text_and_of_its_token_ids_are_the_same(server: Server) -> None:
    text = fresh("The capital of France is")
    ids = server.tokens(text)
    with server.client() as client:
        by_text = client.completions.create(model="smollm2", prompt=text, temperature=0, max_tokens=8)
        by_ids = client.completions.create(model="smollm2", prompt=ids, temperature=0, max_tokens=8)
        with client.completions.create(model="smollm2", prompt=ids, temperature=0, max_tokens=8,
                                       stream=True) as stream:
            streamed = "".join(c.choices[0].text for c in stream)
    assert by_ids.choices[0].text == by_text.choices[0].text == streamed
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)
    assert server.ask("/detokenize", {"tokens": ids}).body["prompt"].endswith(text)


def test_several_prompts_in_one_completion_keep_their_order(server: Server) -> None:
    prompts = [server.tokens(fresh(f"{n} and {n} make")) for n in (1, 2, 3)]
    alone = [server.complete(p, max_tokens=5).body["choices"][0]["text"] for p in prompts]
    together = server.ask(COMPLETIONS, {"prompt": prompts, "temperature": 0, "max_tokens": 5})
    assert [c["text"] for c in together.body["choices"]] == alone
    assert together.usage["prompt_tokens"] == sum(map(len, prompts))


def test_a_seed_repeats_whatever_else_runs(server: Server) -> None:
    """Alone, in a batch, from a warm cache; and another seed says something else."""
    body = chat_body(fresh("Tell me a story."), temperature=1, seed=1234, max_tokens=16, ignore_eos=True)

    def said(answer: Any) -> str:
        return str(answer.body["choices"][0]["message"]["content"])
    alone = said(server.ask(CHAT, body))
    others = [chat_body(fresh(f"Count to {n}."), temperature=1, max_tokens=24, ignore_eos=True) for n in range(3)]
    asks: list[Any] = [lambda b=b: server.ask(CHAT, b) for b in (*others, body, {**body, "seed": 4321}, body)]
    *_, again, other, once_more = server.together(asks)
    assert said(again) == said(once_more) == alone
    assert said(other) != alone


def test_without_a_seed_and_at_temperature_1_answers_differ(server: Server) -> None:
    body = chat_body(fresh("Tell me a story."), temperature=1, max_tokens=16, ignore_eos=True)
    assert len({server.ask(CHAT, body).body["choices"][0]["message"]["content"] for _ in range(3)}) > 1


def test_logprobs_are_those_of_the_text_and_change_nothing(server: Server) -> None:
    question = fresh("Name three fruits.")
    plain = server.chat(question, max_tokens=10)
    told = server.chat(question, max_tokens=10, logprobs=True, top_logprobs=3)
    choice = told.body["choices"][0]
    assert choice["message"] == plain.body["choices"][0]["message"]
    tokens = choice["logprobs"]["content"]
    assert b"".join(bytes(t["bytes"]) for t in tokens).decode() == choice["message"]["content"]
    for t in tokens:
        assert len(t["top_logprobs"]) == 3
        top = [p["logprob"] for p in t["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert t["logprob"] == top[0] <= 0  # greedy takes the likeliest
    stream = server.open(CHAT, chat_body(question, max_tokens=10, logprobs=True, top_logprobs=3))
    streamed = [t for e in stream.rest() if e != "[DONE]" for c in e["choices"] if c["logprobs"]
                for t in c["logprobs"]["content"]]
    stream.leave()
    assert streamed == tokens


def test_a_stop_string_ends_the_reply_and_the_work(server: Server) -> None:
    question = fresh("Count: one, two, three.")
    whole = server.chat(question, max_tokens=48, ignore_eos=True)
    text = whole.body["choices"][0]["message"]["content"]
    stop = text[len(text) // 2:len(text) // 2 + 3]
    shown = text[:text.index(stop)]
    before = server.stats()["tokens"]["generated"]
    cut = server.chat(question, max_tokens=48, ignore_eos=True, stop=[stop, "never to be seen"])
    assert cut.body["choices"][0]["message"]["content"] == shown
    assert cut.body["choices"][0]["finish_reason"] == "stop"
    assert cut.usage["completion_tokens"] < 48
    server.idle()
    assert server.stats()["tokens"]["generated"] - before < 48
    stream = server.open(CHAT, chat_body(question, max_tokens=48, ignore_eos=True, stop=stop))
    assert text_of(stream.rest()) == shown
    stream.leave()


def test_min_tokens_stop_token_ids_and_max_tokens(server: Server) -> None:
    ids = server.tokens(fresh("A list: apple, pear,"))
    whole = server.complete(ids, max_tokens=12, ignore_eos=True, logprobs=0)
    assert whole.usage["completion_tokens"] == 12
    assert whole.body["choices"][0]["finish_reason"] == "length"
    sampled = server.tokens(whole.body["choices"][0]["text"])
    stop = sampled[3]
    ended = server.complete(ids, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert ended.body["choices"][0]["finish_reason"] == "stop"
    assert ended.usage["completion_tokens"] <= 12
    assert whole.body["choices"][0]["text"].startswith(ended.body["choices"][0]["text"])
    later = server.complete(ids, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=10)
    assert later.usage["completion_tokens"] >= 10


def test_an_assistant_s_beginning_is_continued(server: Server) -> None:
    messages = [{"role": "user", "content": fresh("Say the alphabet.")}, {"role": "assistant", "content": "A, B,"}]
    more = server.ask(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 6,
                             "continue_final_message": True, "add_generation_prompt": False})
    rendered = server.ask("/tokenize", {"messages": messages, "continue_final_message": True,
                                        "add_generation_prompt": False})
    assert more.usage["prompt_tokens"] == rendered.body["count"]
    assert server.ask("/detokenize", {"tokens": rendered.body["tokens"]}).body["prompt"].endswith("A, B,")


def test_tool_messages_render_as_text_where_the_template_knows_none(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.",
                                               "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": fresh("Look.")},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "a blue door"}]
    answer = server.ask(CHAT, {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 4})
    assert answer.usage["prompt_tokens"] > 0
    ids = server.ask("/tokenize", {"messages": messages, "tools": tools}).body["tokens"]
    assert "a blue door" in server.ask("/detokenize", {"tokens": ids}).body["prompt"]


# -- whole characters ----------------------------------------------------------------------------------------

SPECIAL = re.compile(r"<[|\w]+>")
CHARACTERS = ["Emoji only: 😀😃😄😁😆😅🤣😂🙂🙃😉😊😇🥰😍🤩😘", "日本語で書いてください。春は曙。やうやう白く",
              "🇫🇷🇩🇪🇯🇵🇰🇷 👨‍👩‍👧‍👦 👩🏽‍🚀 한국어로 대답해 주세요: 안녕하세요"]


@pytest.mark.parametrize("prompt", CHARACTERS, ids=["emoji", "kana", "flags"])
def test_characters_over_several_tokens_come_whole(server: Server, prompt: str) -> None:
    """PITFALLS 55. A model at temperature 1 may write bytes that are no characters, and U+FFFD is right for them.
    So what comes is compared with all tokens' bytes at once: a character that was cut would differ from it."""
    def streamed(body: dict[str, Any]) -> str:
        stream = server.open(CHAT, body)
        events = stream.rest()
        stream.leave()
        return text_of(events)

    def whole(body: dict[str, Any]) -> Any:
        return server.ask(CHAT, {**body, "logprobs": True}).body["choices"][0]
    bodies = [chat_body(f"Repeat, and go on: {prompt}", temperature=1, seed=seed, max_tokens=24) for seed in range(3)]
    asks: list[Any] = [lambda ask=ask, body=body: ask(body) for body in bodies for ask in (streamed, whole)]
    answers = server.together(asks)
    split = 0
    for text, choice in zip(answers[::2], answers[1::2], strict=True):
        pieces = [bytes(t["bytes"]) for t in choice["logprobs"]["content"] if not SPECIAL.fullmatch(t["token"])]
        assert text == choice["message"]["content"] == b"".join(pieces).decode("utf-8", "replace")
        split += sum(piece.decode("utf-8", "ignore").encode() != piece for piece in pieces)
    assert split > 0  # some characters were over several tokens
