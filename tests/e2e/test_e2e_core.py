"""The real core behind `CoreClient`, without HTTP: cancels in each state, with an audit after each.

The audit walks the whole tree and every block table, which HTTP does not show.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from engine.config import ServeConfig
from engine.core.client import CoreClient, start_core
from engine.core.messages import Delta, GenerateRequest, Sampling, Usage
from engine.errors import ContextLengthError, RequestError
from engine.model.library import ModelFiles

SLOTS_MIB, STEP, BLOCK = 64, 64, 16
ANSWER_S = 120
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def core(runner: asyncio.Runner, model: ModelFiles, device: str) -> Iterator[CoreClient]:
    """Two sequences at a time, steps of 64 tokens."""
    config = ServeConfig(model=model.name, hbm=SLOTS_MIB << 20, step_tokens=STEP, max_running=2,
                         device=device)  # type: ignore[arg-type]

    async def begin() -> CoreClient:
        client = await start_core(config)
        await client.ready()
        return client
    client = runner.run(begin())
    yield client
    runner.run(client.close())


@pytest.fixture
def run(runner: asyncio.Runner, core: CoreClient) -> Run:
    return lambda test: runner.run(asyncio.wait_for(test, ANSWER_S))


def prompt(n: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in random.SystemRandom().choices(range(1000, 40_000), k=n))


class Asked:
    """A request that is read in the background until it is left."""

    def __init__(self, core: CoreClient, ids: bytes, n: int = 2, **sampling: Any) -> None:
        self.got = b""
        self.usage: Usage | None = None
        self.deltas: list[Delta] = []
        self.id = random.SystemRandom().randbytes(8).hex()
        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        request = GenerateRequest(self.id, ids, Sampling(max_tokens=n, **options))
        self.task = asyncio.ensure_future(self._read(core.generate(request)))

    async def _read(self, deltas: AsyncGenerator[Delta, None]) -> Asked:
        async with aclosing(deltas):
            async for delta in deltas:
                self.deltas.append(delta)
                self.got += delta.ids
                self.usage = delta.usage
        return self

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def clean(core: CoreClient) -> dict[str, Any]:
    """The counters, after seeing that nothing is held by nobody."""
    stats = await core.stats(audit=True)
    assert stats["audit"] == []
    hbm = stats["tiers"]["hbm"]
    assert hbm["free"] + hbm["evictable"] == hbm["slots"]
    requests = stats["requests"]
    assert (requests["running"], requests["waiting"], requests["flights"]) == (0, 0, 0)
    return stats


def test_a_cancel_while_it_decodes(core: CoreClient, run: Run) -> None:
    async def go() -> None:
        before = await clean(core)
        ids = prompt(50)
        asked = Asked(core, ids, 1000)
        await until(lambda: len(asked.got) >= 4 * 20)
        await asked.leave()
        after = await clean(core)
        made = after["tokens"]["generated"] - before["tokens"]["generated"]
        assert 20 <= made <= len(asked.got) // 4 + 2  # PITFALLS 46: at most two steps more than were read
        # what it did is known: its prompt and what it made, less the last one and what is no whole block
        more = await Asked(core, ids + asked.got + prompt(1), 1).task
        assert more.usage.cached_tokens >= 50 + len(asked.got) // 4 - 1
        await clean(core)
    run(go())


@pytest.mark.parametrize("percent", [20, 60, 90])
def test_a_cancel_while_it_prefills_leaves_what_was_done(core: CoreClient, run: Run, percent: int) -> None:
    """PITFALLS 45 and 47."""
    async def go() -> None:
        before, ids = await clean(core), prompt(600)
        asked = Asked(core, ids)
        await until(lambda: asked.deltas and asked.deltas[-1].prefilled >= 6 * percent)
        assert asked.deltas[-1].prefill_total == 600
        await asked.leave()
        after = await clean(core)
        done = after["tokens"]["computed_in_steps"] - before["tokens"]["computed_in_steps"]
        assert 6 * percent <= done <= asked.deltas[-1].prefilled + 2 * STEP
        assert asked.got == b""
        retry = await Asked(core, ids).task
        assert retry.usage.cached_tokens >= min(done, 599) // BLOCK * BLOCK
        assert retry.usage.cached_tokens + sum(retry.usage.computed.values()) == 600
        await clean(core)
    run(go())


def test_a_cancel_while_it_waits_for_a_place(core: CoreClient, run: Run) -> None:
    async def go() -> None:
        before = await clean(core)
        running = [Asked(core, prompt(30), 1000) for _ in range(2)]
        await until(lambda: all(len(r.got) for r in running))
        third = Asked(core, prompt(30))
        while (await core.stats())["requests"]["waiting"] != 1:
            pass
        await third.leave()
        stats = await core.stats(audit=True)
        assert stats["audit"] == []
        assert (stats["requests"]["waiting"], stats["requests"]["running"]) == (0, 2)
        for r in running:
            await r.leave()
        after = await clean(core)
        assert after["tokens"]["prompt"] - before["tokens"]["prompt"] == 60  # the third was never admitted
        assert after["requests"]["cancelled"] - before["requests"]["cancelled"] == 3
    run(go())


@pytest.mark.parametrize("who", ["leader", "waiter", "all"])
def test_a_cancel_in_a_flight(core: CoreClient, run: Run, who: str) -> None:
    """PITFALLS 49. Two wait for the third's prefill."""
    async def go() -> None:
        before, ids = await clean(core), prompt(600)
        asked = [Asked(core, ids, 3) for _ in range(3)]
        await until(lambda: any(a.deltas for a in asked))
        assert (await core.stats())["requests"]["waiting"] == 2
        leader = next(a for a in asked if a.deltas)
        waiters = [a for a in asked if a is not leader]
        leave = {"leader": [leader], "waiter": waiters[:1], "all": asked}[who]
        for a in leave:
            await a.leave()
        stay = [a for a in asked if a not in leave]
        for a in stay:
            await a.task
            assert len(a.got) == 4 * 3
        assert len({a.got for a in stay}) <= 1
        after = await clean(core)
        computed = after["tokens"]["computed_in_steps"] - before["tokens"]["computed_in_steps"]
        assert computed <= 600 + 3 * (BLOCK + 2)  # one prefill; open blocks again, and decodes
    run(go())


def test_a_storm_of_cancels_leaves_nothing_behind(core: CoreClient, run: Run) -> None:
    """Shared and own prompts, more than may run, each left at a moment of its own."""
    async def go() -> None:
        rng = random.Random(11)
        heads = [prompt(n) for n in (40, 90, 150)]
        asked = []
        for i in range(24):
            asked.append(Asked(core, rng.choice(heads) + (prompt(rng.randint(1, 40)) if i % 3 else b""),
                               rng.choice([2, 6, 500])))
            await asyncio.sleep(rng.random() * 0.1)
            if rng.random() < 0.6:
                await rng.choice(asked).leave()
        for a in asked:
            if rng.random() < 0.5:
                await asyncio.wait([a.task], timeout=0.5)
            await a.leave()
        assert any(a.usage for a in asked)  # some came to their end
        await clean(core)
    run(go())


@pytest.mark.slow
def test_preempted_or_not_the_answers_are_the_same(core: CoreClient, run: Run) -> None:
    """Two that do not fit together: either asks for a little more than half of the pool in the end."""
    async def go() -> None:
        before = await clean(core)
        a, b = prompt(1300), prompt(1300)
        slots = before["tiers"]["hbm"]["slots"]
        n = slots * BLOCK // 2 - 1300 + 40
        first = [Asked(core, p, n) for p in (a, b)]
        together = [(await one.task).got for one in first]
        after = await clean(core)
        assert after["requests"]["preempted"] > before["requests"]["preempted"]
        for one in first:
            assert one.usage is not None
            assert one.usage.cached_tokens == 0  # PITFALLS 11: its own work, found again, is no hit
        alone = [(await Asked(core, p, n).task).got for p in (a, b)]
        assert alone == together
        await clean(core)
    run(go())


def test_refusals_keep_their_class_and_leave_nothing(core: CoreClient, run: Run) -> None:
    async def go() -> None:
        assert core.info is not None
        with pytest.raises(ContextLengthError, match=str(core.info.max_context)):
            await Asked(core, prompt(core.info.max_context)).task
        with pytest.raises(ContextLengthError, match="--hbm"):
            await Asked(core, prompt(core.info.pool_blocks * BLOCK + 1)).task
        with pytest.raises(RequestError, match=str(core.info.vocab_size)):
            await Asked(core, core.info.vocab_size.to_bytes(4, "little")).task
        with pytest.raises(RequestError, match="no tokens"):
            await Asked(core, b"").task
        await clean(core)
    run(go())
