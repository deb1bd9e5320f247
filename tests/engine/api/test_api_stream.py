"""PITFALLS 46, 55, 56, 58, and what a stream does when something breaks."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import Any

import aiohttp
import pytest
from api_harness import (
    FakeCore,
    Reply,
    Step,
    ask,
    chat,
    chat_text,
    events,
    ids_of,
    run,
    send,
    serving,
    stream,
    until,
    usage_of,
)

from engine.core.messages import Delta, GenerateRequest
from engine.errors import ContextLengthError, EngineError, OverloadedError

CHAT = "/v1/chat/completions"


def splits(data: bytes) -> list[list[bytes]]:
    """Every way to cut `data` into pieces."""
    out = []
    for cuts in itertools.product((False, True), repeat=len(data) - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(data)]
        out.append([data[a:b] for a, b in itertools.pairwise(at)])
    return out


def by_request(many: list[list[bytes]]) -> FakeCore:
    """Request k is answered with `many[k]`; its prompt is k token ids."""
    return FakeCore(reply=lambda r: Reply(list(many[len(r.ids) // 4 - 1])))


async def texts(many: list[list[bytes]], **fields: Any) -> list[tuple[str, Any]]:
    """(text, last chunk) of a streamed completion for each reply."""
    out = []
    async with serving(by_request(many)) as url:
        for k in range(len(many)):
            chunks, _, _ = await events(url, "/v1/completions", {"prompt": [1] * (k + 1), **fields})
            out.append(("".join(c["choices"][0]["text"] for c in chunks[:-1]), chunks[-2]))
    return out


def test_a_character_over_several_tokens_never_shows_as_a_replacement() -> None:
    text = "é→😀"
    assert {t for t, _ in run(texts(splits(text.encode())[::7]))} == {text}


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    (text, _), = run(texts([["é".encode(), b"\xf0\x9f"]]))
    assert text == "é\ufffd"


@pytest.mark.parametrize(("reply", "stops", "shown"), [
    ("abSTOPcd", ["STOP"], "ab"),               # cut where it begins
    ("abSTOcd", ["STOP"], "abSTOcd"),           # what was not one comes out whole
    ("abSTO", ["STOP"], "abSTO"),               # held back at the end, and let go
    ("aaab", ["aab"], "a"),                     # begins inside a failed beginning
    ("xyénd", ["én", "z"], "xy"),
])
def test_a_stop_string_never_leaks_nor_loses_what_follows(reply: str, stops: list[str], shown: str) -> None:
    got = run(texts(splits(reply.encode())[::3], stop=stops))
    assert {t for t, _ in got} == {shown}
    assert {last["choices"][0]["finish_reason"] for _, last in got} == {"stop"}


def test_unstreamed_and_streamed_stop_at_the_same_place() -> None:
    steps = ("one tw", "o END th", "ree")
    whole = ask(CHAT, chat(stop="END"), FakeCore(*steps)).body
    chunks, _, _ = stream(CHAT, chat(stop="END", stream_options={"include_usage": True}), FakeCore(*steps))
    assert whole["choices"][0]["message"]["content"] == chat_text(chunks) == "one two "
    assert whole["choices"][0]["finish_reason"] == chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"] == chunks[-2]["usage"]


def test_a_stop_string_cancels_in_the_core_and_the_usage_still_comes() -> None:
    core = FakeCore("abc", "dXYe", "fgh", "ijk")
    body = ask(CHAT, chat(stop=["XY"]), core).body
    assert body["choices"][0]["message"]["content"] == "abcd"
    assert core.cancelled == [core.requests[0].id]
    assert core.counted[core.requests[0].id] > 6, "the core overshot"
    assert body["usage"]["completion_tokens"] == len("abcdXY")
    assert body["usage"]["prompt_tokens"] > 0


def test_one_delta_of_many_tokens_is_cut_at_the_token_of_the_stop() -> None:
    body = ask(CHAT, chat(stop="d", logprobs=True), FakeCore("abcdefgh")).body
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["usage"]["completion_tokens"] == 4
    assert [t["token"] for t in body["choices"][0]["logprobs"]["content"]] == ["a", "b", "c"]


def test_a_stop_string_in_the_last_delta_is_a_stop_and_no_length() -> None:
    def reply(request: GenerateRequest) -> Reply:
        return Reply([Delta(request.id, ids_of("abX"), finish="length", usage=usage_of(request, 3))])
    whole = ask(CHAT, chat(stop="X"), FakeCore(reply=reply)).body["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("ab", "stop")


def test_only_the_choice_that_matched_is_cancelled() -> None:
    core = FakeCore(reply=lambda r: Reply(["aXb", "c", "d"] if r.id.endswith("-0") else ["a", "b", "c"]))
    body = ask(CHAT, chat(n=2, stop="X"), core).body
    assert [c["message"]["content"] for c in body["choices"]] == ["a", "abc"]
    assert [i[-2:] for i in core.cancelled] == ["-0"]


# ── keep-alives ──────────────────────────────────────────────────────────────────────────────────────────


def progress(request: GenerateRequest) -> Delta:
    return Delta(request.id, prefilled=100, prefill_total=300)


def test_a_long_prefill_is_bridged_with_comments_that_clients_ignore() -> None:
    def reply(request: GenerateRequest) -> Reply:
        return Reply([0.15, progress(request), 0.15, "ok"])
    chunks, comments, status = stream(CHAT, chat(), FakeCore(reply=reply), keep_alive_s=0.05)
    assert status == 200
    assert set(comments) == {": keep-alive"}
    assert len(comments) >= 3
    assert chat_text(chunks) == "ok"
    assert chunks[-1] == "[DONE]"


def test_no_comment_where_nothing_is_slow() -> None:
    _, comments, _ = stream(CHAT, chat(), FakeCore("a", "b"))
    assert comments == []


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), [
    (ContextLengthError("the prompt has 9 tokens, and the pool holds 8"), 400, "context_length_exceeded"),
    (OverloadedError("1024 requests wait already"), 429, "overloaded"),
    (EngineError("the core died"), 500, None),
    (RuntimeError("a secret path"), 500, "internal_error"),
])
def test_an_error_before_the_first_token_has_a_status(
        error: Exception, status: int, code: str | None, streamed: bool) -> None:
    answer = ask(CHAT, chat(stream=streamed), FakeCore(error))
    assert answer.status == status
    assert answer.error["code"] == code
    assert "secret" not in answer.error["message"]
    assert ("Retry-After" in answer.headers) == (status == 429)


def test_an_error_in_mid_stream_is_an_event_and_the_end() -> None:
    chunks, _, status = stream(CHAT, chat(), FakeCore("a", EngineError("the core died")))
    assert status == 200
    assert chat_text(chunks[:-1]) == "a"
    assert chunks[-1] == {"error": {"message": "the core died", "type": "server_error", "param": None,
                                    "code": None}}


def test_a_failed_delta_is_an_error_with_the_core_s_words() -> None:
    answer = ask(CHAT, chat(), FakeCore("a", Delta("x", finish="error", error="the step failed")))
    assert (answer.status, answer.error["message"]) == (500, "the step failed")


def test_one_failing_choice_ends_the_others() -> None:
    core = FakeCore(reply=lambda r: Reply([EngineError("no")] if r.id.endswith("-1") else ["a", 30.0]))
    assert ask(CHAT, chat(n=3), core).status == 500
    assert len(core.ended) == 3


# ── clients that go away ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("steps", [(60.0,), ("a", 60.0)])
def test_a_client_that_goes_away_ends_the_request_in_the_core(
        steps: tuple[Step, ...], streamed: bool) -> None:
    core = FakeCore(*steps)

    async def go() -> None:
        # No keep-alive may fall into the test: writing one would notice as well, seconds later.
        async with serving(core, keep_alive_s=60) as url, aiohttp.ClientSession() as session:
            asked = session.post(url + CHAT, json=chat(stream=streamed, n=2))
            request = asyncio.create_task(asked.__aenter__())
            await until(lambda: len(core.requests) == 2)
            if streamed and len(steps) == 2:
                response = await request
                await response.content.readany()
                response.close()
            else:
                request.cancel()
            await until(lambda: len(core.ended) == 2)
            assert sorted(core.cancelled) == sorted(r.id for r in core.requests)
            assert (await send(url, "GET", "/health")).status == 200
    run(go())


def test_a_client_that_does_not_read_is_cut_off() -> None:
    core = FakeCore(reply=lambda r: Reply(["x" * 5000] * 10_000))

    async def go() -> None:
        async with serving(core, drain_timeout_s=0.2) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, (host, int(port)))
            body = json.dumps(chat(stream=True))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(sock, (head + body).encode())
            await until(lambda: bool(core.ended))
            assert core.cancelled == [core.requests[0].id]
            sock.close()
            assert (await send(url, "GET", "/health")).status == 200
    run(go())
