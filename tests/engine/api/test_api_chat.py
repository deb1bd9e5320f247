from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from api_harness import (
    INFO,
    MAX_CONTEXT,
    SPECIALS,
    FakeCore,
    Reply,
    ask,
    byte_tokenizer,
    chat,
    chat_text,
    make_text,
    run,
    serving,
    stream,
)
from openai import AsyncOpenAI

from engine.config import ServeConfig
from engine.core.messages import Delta, GenerateRequest, Sampling, Usage

PATH = "/v1/chat/completions"
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = len("user\nHi" + "\n" + "assistant\n") + 3


def prompt_text(core: FakeCore) -> str:
    return byte_tokenizer().decode(core.requests[0].ids, skip_special=False)


def sampling_of(**fields: Any) -> Sampling:
    core = FakeCore()
    answer = ask(PATH, chat(**fields), core)
    assert answer.status == 200, answer.body
    return core.requests[0].sampling


def test_openai_client_gets_a_whole_reply() -> None:
    core = FakeCore(reply=lambda r: Reply(["Hel", "lo"], cached=16))

    async def go() -> Any:
        async with serving(core) as url, AsyncOpenAI(base_url=url + "/v1", api_key="any") as client:
            return await client.chat.completions.create(
                model="bytes", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=9)
    reply = run(go())
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == "bytes"
    assert reply.system_fingerprint.startswith("fp_")
    assert reply.created > 1_700_000_000
    choice, = reply.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hello")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": PROMPT_TOKENS, "completion_tokens": 5, "total_tokens": PROMPT_TOKENS + 5,
        "prompt_tokens_details": {"cached_tokens": 16},
        "cache": {"cached": {"hbm": 16}, "computed": {"never_seen": PROMPT_TOKENS - 17, "last_token": 1}}}
    assert core.cancelled == []


def test_openai_client_streams() -> None:
    core = FakeCore("Hel", "lo", " you")

    async def go() -> list[Any]:
        async with serving(core) as url, AsyncOpenAI(base_url=url + "/v1", api_key="any") as client:
            chunks = await client.chat.completions.create(
                model="bytes", messages=[{"role": "user", "content": "Hi"}], stream=True,
                stream_options={"include_usage": True})
            return [chunk async for chunk in chunks]
    chunks = run(go())
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[1:-2]] == ["Hel", "lo", " you"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])


def test_chunks_have_openai_s_shape() -> None:
    chunks, _, status = stream(PATH, chat(), FakeCore("a"))
    assert status == 200
    head = {k: chunks[0][k] for k in ("id", "created", "model", "system_fingerprint")}
    head["object"] = "chat.completion.chunk"

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}
    assert chunks == [chunk({"role": "assistant", "content": ""}), chunk({"content": "a"}), chunk({}, "stop"),
                      "[DONE]"]


@pytest.mark.parametrize("cached", [0, 16])
def test_usage_is_the_same_streamed_or_not_and_never_null(cached: int) -> None:
    def reply(request: GenerateRequest) -> Reply:
        return Reply(["Hello"], cached=cached)
    whole = ask(PATH, chat(), FakeCore(reply=reply)).body
    chunks, _, _ = stream(PATH, chat(stream_options={"include_usage": True}), FakeCore(reply=reply))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert all(c["usage"] is None for c in chunks[:-2])


@pytest.mark.parametrize("cached", [{"hbm": 3, "ram": 16, "nvme": 2}, {"hbm": 0, "ram": 0, "nvme": 0}])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["ll"]}], ids=["one", "two choices", "a stop string"])
def test_each_tier_is_in_the_usage_with_its_zeros_streamed_or_not(cached: dict[str, int],
                                                                  fields: dict[str, Any]) -> None:
    """PITFALLS 12, and the tiers' part of usage in the issue: whole, in every kind of reply."""
    def reply(request: GenerateRequest) -> Reply:
        return Reply(["Hello"], cached=cached)
    usage = ask(PATH, chat(**fields), FakeCore(reply=reply)).body["usage"]
    chunks, _, _ = stream(PATH, chat(stream_options={"include_usage": True}, **fields), FakeCore(reply=reply))
    assert usage["cache"]["cached"] == cached
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(cached.values())
    assert sum(cached.values()) + sum(usage["cache"]["computed"].values()) == usage["prompt_tokens"] == PROMPT_TOKENS
    assert chunks[-2]["usage"] == usage


def test_tiers_that_the_server_has_not_are_not_in_the_usage() -> None:
    assert ask(PATH, chat()).body["usage"]["cache"]["cached"] == {"hbm": 0}


def test_a_load_that_failed_reaches_the_client_as_a_reason() -> None:
    usage = Usage(PROMPT_TOKENS, 1, {"hbm": 1, "ram": 0}, {"load_failed": PROMPT_TOKENS - 2, "last_token": 1})
    last = Delta("", finish="stop", usage=usage)
    cache = ask(PATH, chat(), FakeCore("x", last)).body["usage"]["cache"]
    assert cache == {"cached": {"hbm": 1, "ram": 0}, "computed": usage.computed}


def test_cached_and_computed_add_up_to_the_prompt() -> None:
    usage = ask(PATH, chat(), FakeCore(reply=lambda r: Reply(["x"], cached=3))).body["usage"]
    cache = usage["cache"]
    assert sum(cache["cached"].values()) + sum(cache["computed"].values()) == usage["prompt_tokens"]


def test_n_choices_count_the_prompt_once_and_their_tokens_together() -> None:
    def reply(request: GenerateRequest) -> Reply:
        i = int(request.id[-1])
        return Reply(["x" * (i + 1)], finish="length" if i == 1 else "stop", cached=0 if i == 0 else 10)
    core = FakeCore(reply=reply)
    body = ask(PATH, chat(n=3), core).body
    assert [c["message"]["content"] for c in body["choices"]] == ["x", "xx", "xxx"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length", "stop"]
    assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["usage"]["completion_tokens"] == 6
    assert len({r.ids for r in core.requests}) == 1
    assert len({r.id for r in core.requests}) == 3


def test_n_choices_stream_with_a_role_and_a_finish_each() -> None:
    core = FakeCore(reply=lambda r: Reply(["a", "b" * int(r.id[-1])]))
    chunks, _, _ = stream(PATH, chat(n=3, stream_options={"include_usage": True}), core)
    assert [chat_text(chunks, i) for i in range(3)] == ["a", "ab", "abb"]
    choices = [c for chunk in chunks[:-2] for c in chunk["choices"]]
    assert sorted(c["index"] for c in choices if "role" in c["delta"]) == [0, 1, 2]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]
    assert chunks[-2]["usage"]["prompt_tokens"] == PROMPT_TOKENS


def test_a_seed_gives_each_choice_its_own() -> None:
    core = FakeCore()
    ask(PATH, chat(n=2, seed=2**63 - 1), core)
    assert sorted(r.sampling.seed or 0 for r in core.requests) == [-(2**63), 2**63 - 1]


def test_defaults_of_sampling() -> None:
    assert sampling_of() == Sampling(max_tokens=MAX_CONTEXT - PROMPT_TOKENS)
    assert sampling_of(temperature=None, n=None, stop=None, max_tokens=None, stream=None, logprobs=None,
                       tools=None) == Sampling(max_tokens=MAX_CONTEXT - PROMPT_TOKENS)


def test_every_sampling_field_reaches_the_core() -> None:
    got = sampling_of(max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3,
                      stop_token_ids=[1, 2], min_tokens=2, ignore_eos=True, logprobs=True, top_logprobs=4)
    assert got == Sampling(7, 0.5, 0.9, 40, 0.1, 3, (1, 2), 2, True, 4)
    assert sampling_of(max_completion_tokens=5, max_tokens=7).max_tokens == 5
    assert sampling_of(top_k=-1).top_k == 0
    assert sampling_of(logprobs=True).logprobs == 0
    assert sampling_of(top_p=0).temperature == 0


def test_harmless_values_of_unsupported_fields_are_taken() -> None:
    sampling_of(presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logit_bias={}, best_of=1,
                response_format={"type": "text"}, tool_choice="auto", functions=[], user="me", store=True,
                metadata={"a": 1}, unheard_of={"x": [1]})


def test_messages_are_rendered_and_their_special_tokens_parsed() -> None:
    core = FakeCore()
    ask(PATH, chat(), core)
    assert prompt_text(core) == RENDERED
    ids = np.frombuffer(core.requests[0].ids, "<i4")
    assert (ids >= 256).sum() == 3
    assert len(ids) == PROMPT_TOKENS


def test_text_parts_are_joined_and_developer_is_system() -> None:
    core = FakeCore()
    ask(PATH, {"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "Hi"}]}, core)
    assert prompt_text(core).startswith("<|im_start|>system\nBe\nbrief<|im_end|>")


def test_an_assistant_prefill_is_continued() -> None:
    core = FakeCore()
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure,"}],
            "continue_final_message": True}
    assert ask(PATH, body, core).status == 200
    assert prompt_text(core) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure,"


def test_template_kwargs_and_tools_reach_the_template() -> None:
    text = make_text("{{ messages[0].content }}|{{ mood }}|{% for t in tools or [] %}{{ t.function.name }}"
                     "{% endfor %}|{{ add_generation_prompt }}")
    core = FakeCore()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    ask(PATH, chat(chat_template_kwargs={"mood": "calm"}, tools=tools, add_generation_prompt=False), core,
        text=text)
    assert prompt_text(core) == "Hi|calm|look|False"


def test_tools_become_text_where_the_template_knows_none() -> None:
    core = FakeCore()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    ask(PATH, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
                            {"role": "tool", "tool_call_id": "c1", "content": "blue"}]}, core)
    assert "look" in prompt_text(core)
    assert "sky" in prompt_text(core)
    assert "blue" in prompt_text(core)


def test_logprobs_name_each_token_with_its_bytes() -> None:
    body = ask(PATH, chat(logprobs=True, top_logprobs=2), FakeCore("h", "é")).body
    content = body["choices"][0]["logprobs"]["content"]
    assert [c["bytes"] for c in content] == [[104], [0xC3], [0xA9]]
    assert [c["token"] for c in content] == ["h", "\ufffd", "\ufffd"]
    assert [c["logprob"] for c in content] == [-0.5] * 3
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-1.0, -2.0]


def test_streamed_logprobs_equal_the_whole_reply_s() -> None:
    body = chat(logprobs=True, top_logprobs=1, stop="lo w")
    whole = ask(PATH, body, FakeCore("Hel", "lo", " world")).body["choices"][0]
    chunks, _, _ = stream(PATH, body, FakeCore("Hel", "lo", " world"))
    choices = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"]]
    assert [t for c in choices for t in c["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert "".join(t["token"] for t in whole["logprobs"]["content"]) == "Hel" == whole["message"]["content"]


def test_a_name_an_alias_and_no_name_reach_the_model() -> None:
    config = ServeConfig(served_model_name="own", alias=("gpt-4o", "org/other"))
    for name in ("own", "gpt-4o", "org/other", None):
        answer = ask(PATH, chat(model=name), config=config)
        assert (answer.status, answer.body["model"]) == (200, "own")
    assert ask(PATH, chat(model="bytes"), config=config).status == 404


def test_the_fingerprint_follows_the_model() -> None:
    other = FakeCore()
    other.info = replace(INFO, dtype="bfloat16")
    one = ask(PATH, chat()).body["system_fingerprint"]
    assert one == ask(PATH, chat()).body["system_fingerprint"]
    assert one != ask(PATH, chat(), other).body["system_fingerprint"]


def test_text_of_special_tokens_is_not_shown() -> None:
    from engine.core.messages import Delta
    core = FakeCore("a", Delta("x", (257).to_bytes(4, "little")), "b")
    assert SPECIALS[1] == byte_tokenizer().token_text(257)
    assert ask(PATH, chat(), core).body["choices"][0]["message"]["content"] == "ab"
