"""What attackers and broken clients send below JSON, and values that only the inner layers would choke on."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web
from api_harness import MAX_CONTEXT, FakeCore, ask, chat, make_text, run, send, serving

from engine.api.app import make_app
from engine.api.server import make_runner
from engine.api.state import ServerState
from engine.config import ServeConfig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def raw(url: str, data: bytes) -> tuple[int, bytes]:
    """Status and body of what a server answers to bytes, until it closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    got = await reader.read()
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(("path", "body", "param"), [
    (COMPLETIONS, {"prompt": {}}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop": {}}, "stop"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (CHAT, chat(top_k=10**30), "top_k"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": {"a": 1}}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "name": [1]}]}, "messages[0].name"),
])
def test_a_value_that_only_an_inner_layer_would_choke_on_is_a_400(path: str, body: Any, param: str) -> None:
    core = FakeCore()
    answer = ask(path, body, core)
    assert (answer.status, answer.error["param"], core.requests) == (400, param, [])


@pytest.mark.parametrize(("headers", "code"), [
    ("Content-Encoding: gzip\r\n", "invalid_body"),
    ("Content-Encoding: deflate\r\n", "invalid_body"),
    ("Content-Encoding: br\r\n", "invalid_http"),
    ("Content-Encoding: zstd\r\n", "invalid_http"),
])
def test_a_body_that_is_not_encoded_as_it_says_is_the_client_s_mistake(
        headers: str, code: str, caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = (f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n")

    async def go() -> tuple[int, bytes]:
        async with serving(FakeCore()) as url:
            found = await raw(url, head.encode() + body)
            assert (await send(url, "POST", COMPLETIONS, {"prompt": "x"})).status == 200
            return found
    status, answer = run(go())
    assert (status, json.loads(answer)["error"]["code"]) == (400, code)
    assert b"install" not in answer
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("request_line", [
    b"FOO /v1/models HTTP/1.1\r\n\r\n",
    b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
])
def test_what_is_no_http_is_refused_in_openai_s_shape_without_a_traceback(
        request_line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> tuple[int, bytes]:
        async with serving(FakeCore()) as url:
            return await raw(url, request_line)
    status, answer = run(go())
    error = json.loads(answer)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["code"] in ("invalid_http", "invalid_body")
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("begun", [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
])
def test_a_body_that_stops_in_the_middle_is_a_408_and_not_waited_for(
        begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> tuple[int, str]:
        async with serving(FakeCore(), body_idle_s=0.05) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read(4096)
            writer.close()
            return int(head.split()[1]), json.loads(body)["error"]["code"]
    assert run(go()) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [
    b"", b"GET /health HTTP/1.1\r\nHo", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he"])
def test_a_connection_without_a_whole_request_is_closed(sent: bytes) -> None:
    async def go() -> None:
        state = ServerState(ServeConfig(), core=FakeCore(), text=make_text())
        runner = make_runner(make_app(state), idle_s=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        writer.write(sent)
        await reader.read()          # ends only where the server closes
        writer.close()
        await runner.cleanup()
        state.pool.shutdown()
    run(go())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_a_text_of_many_contexts_is_refused_before_the_whole_of_it_is_tokenised(path: str) -> None:
    """The tokenizer's memory is some 200 bytes a token: gigabytes for a body that is within --max-body."""
    text = make_text()
    lengths: list[int] = []
    encode = text.tokenizer.encode

    def spy(piece: str, **options: Any) -> bytes:
        lengths.append(len(piece))
        return encode(piece, **options)
    text.tokenizer.encode = spy  # type: ignore[method-assign]
    long = "x" * (500 * MAX_CONTEXT)
    body = chat() if path == CHAT else {"prompt": long}
    if path == CHAT:
        body["messages"][0]["content"] = long
    answer = ask(path, body, text=text)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert str(MAX_CONTEXT) in answer.error["message"]
    assert max(lengths) <= 1 << 16


def test_a_long_text_of_few_tokens_is_still_tokenised_whole() -> None:
    """More characters than usual is no reason to refuse: only too many tokens is."""
    answer = ask("/tokenize", {"prompt": "x" * (7 * MAX_CONTEXT)})
    assert (answer.status, answer.body["count"]) == (200, 7 * MAX_CONTEXT + 1)
    answer = ask("/tokenize", {"prompt": "<|im_end|>" * (2 * MAX_CONTEXT)})   # 20 characters for a token of the context
    assert (answer.status, answer.body["count"]) == (200, 2 * MAX_CONTEXT + 1)
