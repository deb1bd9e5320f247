"""What clients get wrong: a clear error in OpenAI's shape, at no cost to the core, and the server lives."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import openai
import pytest
from api_harness import (
    MAX_CONTEXT,
    FakeCore,
    ask,
    chat,
    make_text,
    run,
    send,
    serving,
)
from openai import AsyncOpenAI

from engine.config import ServeConfig

PATH = "/v1/chat/completions"


def refused(body: Any, **options: Any) -> Any:
    """The answer to a bad chat; nothing may have reached the core."""
    core = FakeCore()
    answer = ask(PATH, body, core, **options)
    assert core.requests == []
    return answer


@pytest.mark.parametrize(("fields", "param", "said"), [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": None}, "messages", "null"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]",
     "image_url"),
    ({"max_tokens": -3}, "max_tokens", "-3"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": "5"}, "max_tokens", '"5"'),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "8"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": float("nan")}, "temperature", "NaN"),
    ({"temperature": float("inf")}, "temperature", "Infinity"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "2"),
    ({"seed": 2**63}, "seed", str(2**63)),
    ({"n": 0}, "n", "0"),
    ({"n": 17}, "n", "17"),
    ({"stop": ""}, "stop", '""'),
    ({"stop": ["a", ""]}, "stop[1]", '""'),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [5, 5000]}, "stop_token_ids[1]", "5000"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"frequency_penalty": -1}, "frequency_penalty", "not supported"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"tools": [{"type": "web"}]}, "tools[0]", "web"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "yes"),
])
def test_a_bad_field_is_named_with_its_value(fields: dict[str, Any], param: str, said: str) -> None:
    answer = refused(chat(**fields))
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert said in answer.error["message"]


@pytest.mark.parametrize(("body", "said"), [
    (b'{"messages": [{"role": "user"', "line 1 column 29"),
    (b"", "line 1 column 0"),
    (b"\xff\xfe", "line 1 column 1"),
    (b"[]", "not list"),
    (b"5", "not int"),
    (b"[" * 100_000, "recursion limit"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1 column"),
])
def test_broken_json_is_told_with_its_place(body: bytes, said: str) -> None:
    answer = refused(body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert said in answer.error["message"]


def test_a_long_value_is_not_repeated_whole() -> None:
    assert len(refused(chat(temperature="x" * 100_000)).error["message"]) < 300


def test_a_prompt_over_the_context_names_both_numbers() -> None:
    answer = refused({"messages": [{"role": "user", "content": "x" * MAX_CONTEXT}]})
    tokens = MAX_CONTEXT + len("user\n" + "\n" + "assistant\n") + 3
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_CONTEXT} tokens" in answer.error["message"]
    assert f"({tokens} in the messages, at least 1 in the completion)" in answer.error["message"]


def test_a_text_that_can_t_fit_is_refused_before_it_is_tokenised() -> None:
    text = make_text()
    text.tokenizer.encode = None  # type: ignore[assignment,method-assign]
    answer = refused({"messages": [{"role": "user", "content": "x" * (512 * (MAX_CONTEXT + 1))}]}, text=text)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert str(MAX_CONTEXT) in answer.error["message"]
    assert f"at least {MAX_CONTEXT + 1} tokens" in answer.error["message"]


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    overhead = len("user\n" + "\n" + "assistant\n") + 3
    fits = {"messages": [{"role": "user", "content": "x" * (MAX_CONTEXT - overhead - 1)}]}
    full = {"messages": [{"role": "user", "content": "x" * (MAX_CONTEXT - overhead)}]}
    core = FakeCore()
    assert ask(PATH, fits, core).status == 200
    assert core.requests[0].sampling.max_tokens == 1
    assert refused(full).status == 400


def test_an_unknown_model_is_404_and_names_what_is_served() -> None:
    answer = refused(chat(model="gpt-9"), config=ServeConfig(alias=("gpt-4o",)))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in answer.error["message"]
    assert "bytes, gpt-4o" in answer.error["message"]


@pytest.mark.parametrize(("template", "said"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.nothing.there }}", "failed"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "still running"),
])
def test_a_template_that_raises_or_loops_is_422_and_the_server_lives(template: str, said: str) -> None:
    async def go() -> None:
        async with serving(FakeCore(), text=make_text(template)) as url:
            answer = await send(url, "POST", PATH, chat())
            assert answer.status == 422
            assert said in answer.error["message"]
            assert (await send(url, "POST", "/v1/completions", {"prompt": "a"})).status == 200
    run(go())


# ── bodies, keys, paths ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_50_mb_is_413_and_the_server_lives(chunked: bool) -> None:
    body = b"x" * 50_000_000

    async def pieces() -> Any:
        for i in range(0, len(body), 1_000_000):
            yield body[i:i + 1_000_000]

    async def go() -> None:
        async with serving(FakeCore()) as url, aiohttp.ClientSession() as session:
            async with session.post(url + PATH, data=pieces() if chunked else io.BytesIO(body)) as response:
                assert response.status == 413
                error = (await response.json())["error"]
            assert error["code"] == "request_too_large"
            assert f"the limit is {32 * 2**20}" in error["message"]
            assert (await send(url, "POST", PATH, chat())).status == 200
    run(go())


def test_a_body_at_the_limit_is_read() -> None:
    config = ServeConfig(max_body=200)
    body = json.dumps(chat()).encode()
    assert ask(PATH, body + b" " * (200 - len(body)), config=config).status == 200
    assert ask(PATH, body + b" " * (201 - len(body)), config=config).status == 413


def test_keys() -> None:
    async def go() -> None:
        async with serving(FakeCore(), config=ServeConfig(api_key=("k1", "k2"))) as url:
            for header, status in (("Bearer k1", 200), ("bearer k2", 200), ("Bearer k3", 401), ("k1", 401),
                                   ("Basic k1", 401), ("Bearer", 401), ("Bearer \udcff", 401)):
                answer = await send(url, "POST", PATH, chat(), headers={"Authorization": header})
                assert answer.status == status, header
            answer = await send(url, "POST", PATH, b"not even JSON")
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await send(url, "GET", "/v1/models")).status == 401
            assert (await send(url, "GET", "/health")).status == 200
    run(go())


def test_an_unknown_path_and_a_wrong_method() -> None:
    answer = ask("/v1/nothing", {}, method="POST")
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert "POST /v1/nothing" in answer.error["message"]
    answer = ask(PATH, None, method="GET")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"


def test_openai_client_raises_its_own_errors() -> None:
    async def go() -> None:
        async with (serving(FakeCore(), config=ServeConfig(api_key=("k",))) as url,
                    AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
                    AsyncOpenAI(base_url=url + "/v1", api_key="no", max_retries=0) as stranger):
            say: Any = [{"role": "user", "content": "x" * 500}]
            with pytest.raises(openai.BadRequestError) as found:
                await client.chat.completions.create(model="bytes", messages=say)
            assert (found.value.code, found.value.param) == ("context_length_exceeded", "messages")
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=say)
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
    run(go())


def test_a_request_that_breaks_off_leaves_the_server_alive() -> None:
    async def go() -> None:
        async with serving(FakeCore()) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            for raw in (b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
                        b"\x16\x03\x01\x02\x00\x01", b"POST"):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(raw)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            assert (await send(url, "POST", PATH, chat())).status == 200
    run(go())
