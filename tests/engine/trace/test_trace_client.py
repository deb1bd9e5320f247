"""The client against a stub: what is measured, what is counted, and how each failure is told."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from trace_stub import Answer, Stub

from engine.cli.background import free_port
from engine.errors import StartError
from engine.trace.client import Client, ContextReached, Reply, TurnFailed, base_url, counts, delta_text

BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def ticking() -> Callable[[], float]:
    """A clock that goes on by one second at each look."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def ask(answer: Answer, *, timeout_s: float = 30.0, has_tokenize: bool = True) -> Reply:
    async def once(url: str) -> Reply:
        async with Client(url, clock=ticking(), timeout_s=timeout_s) as client:
            return await client.chat(BODY)

    with Stub(lambda number, body: answer, has_tokenize=has_tokenize) as stub:
        return asyncio.run(once(stub.url))


def test_the_first_token_is_the_first_chunk_with_content() -> None:
    """The chunk that only names the role does not look at the clock: sent 0, chunks 1, 2, 3, finished 4."""
    reply = ask(Answer(["a", "b", "c"]))
    assert (reply.text, reply.ttft_s, reply.gaps_s, reply.finished) == ("abc", 1.0, [1.0, 1.0], 4.0)
    assert reply.finish_reason == "length"


def test_without_content_the_finish_is_the_first_token() -> None:
    reply = ask(Answer([]))
    assert (reply.text, reply.ttft_s, reply.gaps_s) == ("", 1.0, [])


def test_a_server_that_does_not_stream_is_understood() -> None:
    reply = ask(Answer(["a", "b"], plain=True))
    assert (reply.text, reply.finish_reason, reply.ttft_s) == ("ab", "stop", 1.0)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("usage", "cached"), [
    ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}, 0),
    ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}, 4),
    ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": None}}, None),
    ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": None}, None),
    ({"prompt_tokens": 9, "completion_tokens": 1}, None),
    ({"prompt_tokens": 9, "completion_tokens": 1, "cache": {"cached": {"hbm": 3, "ram": 2}}}, 5),
])
def test_cached_tokens_are_the_same_streamed_and_plain(usage: Any, cached: int | None, plain: bool) -> None:
    """PITFALLS 12: 0 is a number that was said, null and nothing are not."""
    found = ask(Answer(["a"], usage=usage, plain=plain)).usage
    assert found is not None
    assert (found.prompt, found.completion, found.cached) == (9, 1, cached)


def test_usage_of_wrong_types_counts_for_nothing() -> None:
    odd = counts({"prompt_tokens": "9", "completion_tokens": True, "prompt_tokens_details": [1],
                  "cache": {"cached": {"hbm": "3"}, "computed": 7}})
    assert (odd.prompt, odd.completion, odd.cached, odd.tiers, odd.computed) == (0, None, None, {}, {})


def test_cached_and_computed_have_to_add_up() -> None:
    def usage(cached: int, hbm: int, computed: int) -> bool:
        return counts({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": cached},
                       "cache": {"cached": {"hbm": hbm}, "computed": {"never_seen": computed}}}).adds_up

    assert usage(4, 4, 6)
    assert not usage(4, 4, 5)
    assert not usage(3, 4, 6)
    assert counts({"prompt_tokens": 10}).adds_up


CONTEXT = {
    "ours, as OpenAI's": (400, {"error": {"message": "8,200 of 8,192", "code": "context_length_exceeded"}}),
    "vLLM's": (400, {"error": {"message": "This model's maximum context length is 8192 tokens. However, you "
                               "requested 9000", "type": "BadRequestError", "code": 400}}),
    "llama-server's": (400, {"error": {"code": 400, "type": "exceed_context_size_error", "message": "too big"}}),
    "in the stream": (200, {"error": {"message": "no", "code": "context_length_exceeded"}}),
}


@pytest.mark.parametrize("name", CONTEXT)
def test_a_prompt_over_the_context_is_told_from_an_error(name: str) -> None:
    status, error = CONTEXT[name]
    with pytest.raises(ContextReached):
        ask(Answer(status=status, error=error))


FAILURES = {
    "500": (Answer(status=500, error={"error": {"message": "out of order"}}), "HTTP 500: out of order"),
    "a proxy's page": (Answer(status=502, error="bad gateway"), "HTTP 502: bad gateway"),
    "FastAPI's shape": (Answer(status=422, error={"detail": [{"loc": 1}]}), "HTTP 422: .*loc"),
    "a server's word for context in a 500": (
        Answer(status=500, error={"message": "context window lost"}), "HTTP 500: context window lost"),
    "an error in the stream": (Answer(error={"error": {"message": "core died"}}), "in the stream: core died"),
    "a cut connection": (Answer(["a"], cut=True), "cut in the middle|closed the connection|Connection"),
    "no JSON": (Answer(raw=b"data: {\n\n"), "not JSON: '{'"),
    "no object": (Answer(raw=b"data: 5\n\n"), "not an object: '5'"),
    "an end too early": (Answer(raw=b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'), "no finish_reason"),
    "nothing": (Answer(raw=b""), "no finish_reason"),
    "odd choices": (Answer(raw=b'data: {"choices": [5]}\n\ndata: {"choices": {}}\n\ndata: [DONE]\n\n'), "no finish"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_turn_says_why(name: str) -> None:
    answer, message = FAILURES[name]
    with pytest.raises(TurnFailed, match=message):
        ask(answer)


def test_an_answer_that_never_comes_is_given_up() -> None:
    gate = threading.Event()
    try:
        with pytest.raises(TurnFailed, match=r"no complete answer within 0.2 s \(--timeout\)"):
            ask(Answer(gate=gate), timeout_s=0.2)
    finally:
        gate.set()


def test_nobody_there_is_a_failed_turn_and_no_start() -> None:
    async def both() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with Client(url) as client:
            with pytest.raises(TurnFailed, match="can't connect: Connection refused"):
                await client.chat(BODY)
            with pytest.raises(StartError, match=rf"no answer from {url}/v1/models .*--url"):
                await client.first_model()
            assert await client.tokenize(BODY) is None
            assert not await client.healthy()

    asyncio.run(both())


def test_a_wrong_key_is_named() -> None:
    async def model(url: str, key: str | None) -> str:
        async with Client(url, api_key=key) as client:
            return await client.first_model()

    with Stub(key="secret") as stub:
        assert asyncio.run(model(stub.url, "secret")) == "stub"
        with pytest.raises(StartError, match=r"401.*--api-key"):
            asyncio.run(model(stub.url, None))


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(StartError, match="--api-key"):
        Client("http://127.0.0.1", api_key=key)


@pytest.mark.parametrize(("given", "used"), [
    ("localhost:8000", "http://localhost:8000"), ("http://h/v1", "http://h"), ("http://h/v1/", "http://h"),
    ("https://h/proxy/v1", "https://h/proxy"), ("http://h/", "http://h"),
])
def test_a_url_may_end_in_v1_or_a_slash(given: str, used: str) -> None:
    assert base_url(given) == used


@pytest.mark.parametrize("url", ["ftp://h", "http://[::1", "http://h:99999", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    async def model() -> None:
        async with Client(url) as client:
            await client.first_model()

    with pytest.raises(StartError, match=r"only http|not a server"):
        asyncio.run(model())


def test_reasoning_and_tool_calls_are_output_too() -> None:
    assert delta_text({"reasoning_content": "hm", "content": None}) == "hm"
    assert delta_text({"tool_calls": [{"function": {"name": "read", "arguments": "{"}}, {"index": 1}, 5]}) == "read{"
    assert delta_text({"content": 5}) == delta_text(None) == delta_text({"content": ""}) == ""


def served_raw(body: bytes, *, url_path: str = "/v1/models") -> Any:
    """What get_json makes of a body, whatever it is."""
    async def go() -> Any:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type="application/json")
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
                return await client.tokenize(BODY) if url_path == "/tokenize" else await client.get_json(url_path)
        finally:
            await runner.cleanup()
    return asyncio.run(go())


@pytest.mark.parametrize("body", [b"[" * 100_000, b"9" * 5000, b"<html>"])
def test_a_document_that_python_can_t_read_is_told(body: bytes) -> None:
    with pytest.raises(StartError, match="did not answer with JSON"):
        served_raw(body)


def test_an_endless_document_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.trace.client._MAX_BODY_BYTES", 1000)
    with pytest.raises(StartError, match="a body of more than"):
        served_raw(b" " * 100_000)


@pytest.mark.parametrize("tokens", [b"[99999999999]", b"[-1]", b"[true]", b"[" * 100_000, b"[1" + b"0" * 5000 + b"]"])
def test_tokens_that_are_none_are_as_good_as_no_tokenize(tokens: bytes) -> None:
    assert served_raw(b'{"tokens": ' + tokens + b"}", url_path="/tokenize") is None


def test_messages_too_deep_to_send_fail_their_turn() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    async def go() -> None:
        async with Client("http://127.0.0.1:1") as client:
            await client.chat({"messages": [{"role": "user", "content": "x", "z": deep}]})
    with pytest.raises(TurnFailed, match="too deeply"):
        asyncio.run(go())


def test_counts_and_calls_of_a_hostile_server_were_not_said() -> None:
    found = counts({"prompt_tokens": 10**400, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": -1}})
    assert (found.prompt, found.completion, found.cached) == (0, None, None)
    assert delta_text({"tool_calls": 5, "content": "x"}) == "x"


@pytest.mark.parametrize("url", ["http://a b", "http://h/?x", "http://h/#x", "http://\udcff", "http://h:0", ""])
def test_what_is_no_address_is_refused_by_value(url: str) -> None:
    with pytest.raises(StartError, match="not a server's address"):
        Client(url)
