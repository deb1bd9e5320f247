from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from api_harness import (
    MAX_CONTEXT,
    FakeCore,
    Reply,
    ask,
    byte_tokenizer,
    ids_of,
    run,
    serving,
    stream,
)
from openai import AsyncOpenAI

from engine.core.messages import GenerateRequest

PATH = "/v1/completions"
BOS = 258


def prompts_of(prompt: Any, **fields: Any) -> list[list[int]]:
    core = FakeCore()
    answer = ask(PATH, {"prompt": prompt, **fields}, core)
    assert answer.status == 200, answer.body
    ordered = sorted(core.requests, key=lambda r: int(r.id.rpartition("-")[2]))
    return [np.frombuffer(r.ids, "<i4").tolist() for r in ordered]


def as_list(text: str) -> list[int]:
    return np.frombuffer(ids_of(text), "<i4").tolist()


def test_openai_client_completes_and_streams() -> None:
    core = FakeCore("one", " two")

    async def go() -> tuple[Any, list[Any]]:
        async with serving(core) as url, AsyncOpenAI(base_url=url + "/v1", api_key="any") as client:
            whole = await client.completions.create(model="bytes", prompt="zero", max_tokens=30)
            chunks = await client.completions.create(model="bytes", prompt="zero", stream=True, max_tokens=30,
                                                     stream_options={"include_usage": True})
            return whole, [chunk async for chunk in chunks]
    whole, chunks = run(go())
    assert whole.id.startswith("cmpl-")
    assert (whole.object, whole.model) == ("text_completion", "bytes")
    assert whole.choices[0].text == "one two"
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 7)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert [c.choices[0].text for c in chunks[:-1]] == ["one", " two", ""]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, "stop"]
    assert chunks[-1].usage == whole.usage


def test_every_form_of_a_prompt() -> None:
    assert prompts_of("ab") == [[BOS, *as_list("ab")]]
    assert prompts_of("ab", add_special_tokens=False) == [as_list("ab")]
    assert prompts_of(["a", "b"]) == [[BOS, *as_list("a")], [BOS, *as_list("b")]]
    assert prompts_of([5, 6]) == [[5, 6]]
    assert prompts_of([[5, 6], [7]]) == [[5, 6], [7]]
    assert prompts_of("") == [[BOS]]


def test_prompts_times_n_are_ordered_and_each_prompt_is_counted_once() -> None:
    core = FakeCore(reply=lambda r: Reply([r.id[-1]], cached=1))
    body = ask(PATH, {"prompt": [[5, 6], [7, 8, 9]], "n": 2}, core).body
    assert [c["text"] for c in body["choices"]] == ["0", "1", "2", "3"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 4
    assert [len(r.ids) // 4 for r in sorted(core.requests, key=lambda r: r.id)] == [2, 2, 3, 3]


def test_several_prompts_are_added_up_tier_by_tier() -> None:
    by_prompt = {"0": {"hbm": 1, "ram": 0, "nvme": 0}, "1": {"hbm": 0, "ram": 0, "nvme": 2}}

    def reply(request: GenerateRequest) -> Reply:
        return Reply(["x"], cached=by_prompt[request.id[-1]])
    body = {"prompt": [[5, 6], [7, 8, 9]], "stream_options": {"include_usage": True}}
    usage = ask(PATH, body, FakeCore(reply=reply)).body["usage"]
    assert usage["cache"]["cached"] == {"hbm": 1, "ram": 0, "nvme": 2}
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    chunks, _, _ = stream(PATH, body, FakeCore(reply=reply))
    assert chunks[-2]["usage"] == usage


def test_max_tokens_is_sixteen_where_none_is_given_as_openai_has_it() -> None:
    core = FakeCore()
    ask(PATH, {"prompt": "a"}, core)
    assert core.requests[0].sampling.max_tokens == 16


def test_logprobs_have_offsets_into_the_text() -> None:
    body = ask(PATH, {"prompt": "a", "logprobs": 1}, FakeCore("h", "é", "!")).body
    got = body["choices"][0]["logprobs"]
    assert got["tokens"] == ["h", "\ufffd", "\ufffd", "!"]
    assert got["token_logprobs"] == [-0.5] * 4
    assert got["text_offset"] == [0, 1, 1, 2]
    assert got["top_logprobs"] == [{byte_tokenizer().token_text(0): -1.0}] * 4
    assert ask(PATH, {"prompt": "a"}).body["choices"][0]["logprobs"] is None


def test_streamed_logprobs_have_the_same_offsets() -> None:
    chunks, _, _ = stream(PATH, {"prompt": "a", "logprobs": 0}, FakeCore("he", "y"))
    offsets = [o for c in chunks[:-1] for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2]


@pytest.mark.parametrize(("fields", "param"), [
    ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"),
    ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt[0]"), ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [5, 100_000]}, "prompt[1]"), ({"prompt": [[5], [-1]]}, "prompt[1][0]"),
    ({"prompt": [5, True]}, "prompt[1]"), ({"prompt": None}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"), ({"prompt": [""] * 9, "n": 16}, "prompt"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"prompt": "x", "stop_token_ids": [9999]}, "stop_token_ids[0]"),
])
def test_what_can_t_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    core = FakeCore()
    answer = ask(PATH, {"prompt": "a", **fields}, core)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert param in answer.error["message"]
    assert core.requests == []


def test_a_prompt_that_fits_alone_but_not_with_max_tokens_is_refused_with_both_numbers() -> None:
    answer = ask(PATH, {"prompt": [1] * (MAX_CONTEXT - 10), "max_tokens": 11})
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert f"{MAX_CONTEXT} tokens" in answer.error["message"]
    assert f"({MAX_CONTEXT - 10} in the prompt, 11 in the completion)" in answer.error["message"]
    assert ask(PATH, {"prompt": [1] * (MAX_CONTEXT - 10), "max_tokens": 10}).status == 200
