"""The API's side of the socket: streams, refusals, cancels, and a core process that dies; on a fake core."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import ServeConfig
from engine.core import client as core_client
from engine.core.client import CoreClient, EngineStartError
from engine.core.messages import Delta, GenerateRequest, Sampling
from engine.errors import (
    ContextLengthError,
    EngineError,
    LoadingError,
    ModelError,
    OverloadedError,
    RequestError,
    StartError,
    TrunklineError,
)

FAKE = Path(__file__).with_name("fake_core_process.py")
#: Generous: a machine with other work starts a Python in seconds.
WAIT_S = 60


def request(what: str, name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, b"\1\0\0\0", Sampling(max_tokens=4), session=what)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_client, "RESTART_FIRST_S", 0.01)
    monkeypatch.setattr(core_client, "END_S", 0.3)


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A client of a fake core whose starts go as `lives` say."""
    @asynccontextmanager
    async def make(*lives: str, ready: bool = True, command: list[str] | None = None) -> AsyncIterator[CoreClient]:
        (tmp_path / "lives").write_text(" ".join(lives or ("ready",)))
        client = CoreClient(ServeConfig(model="some.gguf"),
                            command or [sys.executable, str(FAKE), str(tmp_path / "lives")])
        try:
            if ready:
                await client.ready()
            yield client
        finally:
            await client.close()
    return make


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


async def collect(client: CoreClient, asked: GenerateRequest) -> list[Delta]:
    async with aclosing(client.generate(asked)) as deltas:
        return [d async for d in deltas]


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """`run` bounds it."""
    while True:
        met = condition()
        if met if isinstance(met, bool) else await met:
            return
        await asyncio.sleep(0.005)


async def cancels(client: CoreClient) -> list[str]:
    return list((await client.stats())["cancels"])


async def begun(client: CoreClient, asked: GenerateRequest) -> asyncio.Task[list[Delta]]:
    """A task that collects `asked`, which the core has got."""
    before = (await client.stats())["got"]
    task = asyncio.create_task(collect(client, asked))

    async def has_it() -> bool:
        return bool((await client.stats())["got"] == before + 1)
    await until(has_it)
    return task


# -- streams -------------------------------------------------------------------------------------------------


def test_deltas_come_in_order_and_the_last_has_the_usage(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            assert client.state == "ready"
            assert client.info is not None
            assert client.info.vocab_size == 100
            *deltas, last = await collect(client, request("tokens:5"))
            assert [int.from_bytes(d.ids, "little") for d in deltas] == [0, 1, 2, 3, 4]
            assert all(d.finish is None for d in deltas)
            assert last.finish == "length"
            assert last.usage is not None
            assert (last.usage.cached_tokens, last.usage.computed) == (2, {"last_token": 1})
            assert await cancels(client) == []  # what has ended is not cancelled
    run(go())


def test_streams_at_once_do_not_mix(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            many = await asyncio.gather(*(collect(client, request(f"tokens:{n}", f"r{n}")) for n in range(1, 9)))
            assert [len(m) - 1 for m in many] == [*range(1, 9)]
            assert all(d.id == f"r{n}" for n, deltas in enumerate(many, 1) for d in deltas)
    run(go())


def test_the_core_gets_what_it_reads_of_the_configuration(start: Start) -> None:
    async def go() -> None:
        async with start("fail", ready=False) as client:
            with pytest.raises(ModelError, match=r"some\.gguf is cut short"):
                await client.ready()
    run(go())


def test_stats_with_and_without_an_audit(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            assert "audit" not in await client.stats()
            assert (await client.stats(audit=True))["audit"] == ["none"]
    run(go())


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [
    ("ContextLengthError", ContextLengthError), ("RequestError", RequestError),
    ("OverloadedError", OverloadedError), ("NobodyKnowsThis", RequestError)])
def test_a_refusal_raises_its_class(start: Start, name: str, kind: type[TrunklineError]) -> None:
    async def go() -> None:
        async with start() as client:
            with pytest.raises(kind) as caught:
                await collect(client, request(f"refuse:{name}"))
            assert type(caught.value) is kind
            assert (caught.value.message, caught.value.param) == ("no, 70 > 64", "messages")
            if kind is not RequestError:
                assert caught.value.code == kind.code
            assert await cancels(client) == []
            assert len(await collect(client, request("tokens:1"))) == 2
    run(go())


def test_a_step_that_failed_is_an_engine_error(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            with pytest.raises(EngineError, match="on fire"):
                await collect(client, request("error"))
            assert client.deaths == 0
    run(go())


# -- cancel --------------------------------------------------------------------------------------------------


def test_closing_the_generator_cancels(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            deltas = client.generate(request("hang"))
            assert (await anext(deltas)).ids == b"\1\0\0\0"
            await deltas.aclose()
            stats = await client.stats()
            assert (stats["cancels"], stats["running"]) == (["r"], [])
    run(go())


def test_cancelling_the_task_that_reads_cancels(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            task = await begun(client, request("hang"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await cancels(client) == ["r"]
    run(go())


def test_a_generator_that_was_never_begun_sends_nothing(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            await client.generate(request("hang")).aclose()
            stats = await client.stats()
            assert (stats["got"], stats["cancels"]) == (0, [])
    run(go())


def test_a_cancel_by_id_still_brings_the_last_delta(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            task = await begun(client, request("hang"))
            client.cancel("r")
            *_, last = await task
            assert last.finish == "cancelled"
            assert last.usage is not None
            assert await cancels(client) == ["r"]  # once
    run(go())


# -- death ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["die", "garbage", "oversized", "close"])
def test_a_core_that_dies_fails_everything_in_flight_and_is_started_again(start: Start, how: str) -> None:
    """Killed; a frame that is none; one over the limit; a socket that is closed by a process that lives on."""
    async def go() -> None:
        async with start() as client:
            first = client.pid
            running = [await begun(client, request("hang", f"h{i}")) for i in range(3)]
            ended = await asyncio.gather(*running, collect(client, request(how)), return_exceptions=True)
            assert [type(e) for e in ended] == [EngineError] * 4
            assert "send the request once more" in str(ended[0])
            assert client.deaths == 1
            await until(lambda: client.state == "ready")
            assert client.pid != first
            assert len(await collect(client, request("tokens:3"))) == 4
            assert await cancels(client) == []  # the new one knows nothing of the old one's requests
    run(go())


def test_while_the_core_is_away_requests_are_told_to_come_back(start: Start) -> None:
    """From the moment that the socket is closed, though the process has not ended yet."""
    async def go() -> None:
        async with start("ready", "wait") as client:
            with pytest.raises(EngineError):
                await collect(client, request("close"))
            assert client.state == "dead"
            with pytest.raises(LoadingError):
                await collect(client, request("tokens:1"))
            with pytest.raises(LoadingError):
                await client.stats()
            client.cancel("r")  # harmless
    run(go())


def test_a_question_for_the_counters_fails_with_the_core(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            asked = asyncio.create_task(client.stats())
            await asyncio.sleep(0)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await asked
    run(go())


def test_a_start_that_fails_later_is_tried_again(start: Start) -> None:
    async def go() -> None:
        async with start("ready", "fail", "end", "ready") as client:
            with pytest.raises(EngineError):
                await collect(client, request("die"))
            await until(lambda: client.state == "ready")
            assert client.deaths == 3
            assert len(await collect(client, request("tokens:1"))) == 2
    run(go())


# -- the start -----------------------------------------------------------------------------------------------


def test_while_it_loads_requests_are_told_so(start: Start) -> None:
    async def go() -> None:
        async with start("wait", ready=False) as client:
            assert client.state == "loading"
            with pytest.raises(LoadingError, match="loading"):
                await collect(client, request("tokens:1"))
    run(go())


@pytest.mark.parametrize(("life", "kind", "said"), [
    ("fail", ModelError, r"^some\.gguf is cut short$"), ("fail-other", StartError, "^MemoryError: no room$"),
    ("end", EngineStartError, "ended with code 7 while it was loading"),
    ("garbage", EngineStartError, "while it was loading")])
def test_a_core_that_can_t_start_says_why_and_is_not_tried_again(
        start: Start, life: str, kind: type[StartError], said: str) -> None:
    async def go() -> None:
        async with start(life, "ready", ready=False) as client:
            with pytest.raises(kind, match=said):
                await client.ready()
            await until(lambda: client.state == "dead")
            with pytest.raises(kind):  # whoever asks later hears the same
                await client.ready()
            assert client.info is None
    run(go())


def test_a_command_that_is_not_there_is_a_start_error(start: Start, tmp_path: Path) -> None:
    async def go() -> None:
        async with start(ready=False, command=[str(tmp_path / "nowhere")]) as client:
            with pytest.raises(StartError, match="nowhere"):
                await client.ready()
    run(go())


# -- the end -------------------------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("stopped", [False, True])
def test_close_ends_the_process_and_fails_what_runs(start: Start, stopped: bool) -> None:
    """`stopped`: a process that does not answer is killed."""
    async def go() -> None:
        async with start() as client:
            pid = client.pid
            task = await begun(client, request("hang"))
            if stopped:
                os.kill(pid, signal.SIGSTOP)
            await client.close()
            with pytest.raises(LoadingError, match="shutting down"):
                await task
            with pytest.raises(LoadingError, match="shutting down"):
                await collect(client, request("tokens:1"))
            client.cancel("r")  # harmless
            assert not is_alive(pid)
    run(go())


def test_close_while_it_loads(start: Start) -> None:
    async def go() -> None:
        async with start("wait", ready=False) as client:
            waiting = asyncio.create_task(client.ready())
            await until(lambda: client.pid is not None)
            await client.close()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not is_alive(client.pid)
    run(go())


def test_closing_twice_is_harmless(start: Start) -> None:
    async def go() -> None:
        async with start() as client:
            await client.close()
            await client.close()
    run(go())
