"""A soak of the core: a seed makes a pool, options and a crowd of requests; each answer is checked against the tokens
alone, each step against the audit, and there must be progress in every step but a few."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chain_core import EMPTY, VOCAB, Bench, Chain, ChainRunner, Clock, ids, logits_of

from engine.core.cache import make_cache
from engine.core.core import Core
from engine.core.messages import Delta, GenerateRequest, Sampling, Usage
from engine.core.request import Request, State
from engine.core.scheduler import Scheduler
from engine.errors import ContextLengthError, OverloadedError
from engine.model.sampler import SampleRow, sample

EOS = (3, 500)
#: Steps in a row that may compute nothing: one in which whoever decodes is preempted, and its echo.
IDLE_STEPS = 1


@dataclass
class Asked:
    """A request, and what it has to answer."""

    prompt: list[int]
    sampling: Sampling
    expected: list[int]
    stop_token: int | None


def expect(prompt: Sequence[int], s: Sampling) -> tuple[list[int], int | None]:
    """What the chain says, with stop tokens, min_tokens and all: the answer without any bound, and its stop token."""
    stops = stop_ids(s)
    chain, out = Chain(), list[int]()
    for token in prompt:
        chain.read(token)
    while len(out) < s.max_tokens:
        early = len(out) < s.min_tokens
        row = SampleRow(s, s.seed or 0, len(out), tuple(stops) if early else ())
        token = sample(logits_of(chain.state)[None], [row]).tokens[0]
        if token in stops and not early:
            return out, token
        out.append(token)
        chain.read(token)
    return out, None


def stop_ids(s: Sampling) -> set[int]:
    return set(s.stop_token_ids) | (set() if s.ignore_eos else set(EOS))


class FaultyRunner(ChainRunner):
    """Fails now and then: at a copy, or after some of its rows are written."""

    def __init__(self, slots: int, block_size: int, rng: random.Random, chance: float) -> None:
        super().__init__(slots, block_size)
        self._rng, self._chance = rng, chance

    def execute(self, batch: list) -> object:  # type: ignore[type-arg,override]
        if self._rng.random() < self._chance:
            super().execute(batch[:self._rng.randint(0, len(batch))])
            raise RuntimeError("the device is on fire")
        return super().execute(batch)

    def copy_slot(self, source: int, target: int) -> None:
        if self._rng.random() < self._chance:
            raise RuntimeError("the copy is on fire")
        super().copy_slot(source, target)


@dataclass
class Soak:
    """One universe."""

    seed: int
    asked: dict[str, Asked] = field(default_factory=dict)
    idle: int = 0
    n: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        size = rng.choice([1, 2, 2, 3, 4, 4, 8, 16, 32])
        slots = rng.choice([2, 3, 4, 5, 6, 8, 10, rng.randint(8, 40)])
        running = rng.choice([1, 2, 3, 5, 8])
        self.what: dict[str, Any] = {
            "size": size, "slots": slots, "running": running,
            "step_tokens": rng.choice([running, running + 1, 16, 64, 512]),
            "waiting": rng.choice([2, 16, 64, 64]), "context": rng.choice([size * slots // 2 + 2, 4096, 4096]),
            "fault": rng.choice([0, 0, 0, 0.02]), "ghosts": rng.choice([0, 5, 1000])}
        w = self.what
        clock = Clock()
        self.runner = FaultyRunner(slots, size, rng, w["fault"])
        cache = make_cache(slots, size, clock)
        cache.tree._ghosts.limit = w["ghosts"]
        scheduler = Scheduler(cache, clock, step_tokens=w["step_tokens"], max_running=running, max_waiting=w["waiting"])
        core = Core(scheduler, self.runner, vocab_size=VOCAB, max_context=w["context"], eos_ids=EOS, fingerprint=b"f",
                    clock=clock)
        self.bench = Bench(core, self.runner, clock)
        self.core = core
        self.heads = [rng.choices(range(6), k=rng.randint(1, max(1, size * slots // 2))) for _ in range(3)]

    # -- requests ----------------------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        rng, size = self.rng, self.what["size"]
        most = size * self.what["slots"]
        kind = rng.random()
        base: list[int]
        if kind < 0.25:
            base = rng.choice(self.heads)
        elif kind < 0.65 and self.asked:  # a turn, or a fork, of one that has run or is running; of its answer too
            name = rng.choice(list(self.asked)[-8:])
            base = [*self.asked[name].prompt, *self.bench.got.get(name, [])]
            if rng.random() < 0.4:
                base = base[:rng.randint(0, len(base))]
            if rng.random() < 0.3:
                base = [*base, *expect(base or [1], Sampling(max_tokens=rng.randint(1, 9)))[0]]
        elif kind < 0.75 and self.asked:
            return list(self.asked[rng.choice(list(self.asked)[-4:])].prompt)
        else:
            base = []
        at_a_block = rng.randint(0, most // size) * size + rng.randint(-1, 1)
        length = max(1, rng.choice([len(base) + rng.randint(0, 5), at_a_block, rng.randint(1, most), most - 1, 1]))
        return (base + rng.choices(range(4), k=max(0, length - len(base))))[:length]

    def add(self, prompt: list[int] | None = None) -> None:
        rng = self.rng
        prompt = prompt or self.prompt()
        n = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 60), self.what["size"] * self.what["slots"]])
        stops = tuple(rng.sample(range(-2, VOCAB + 2), rng.choice([0, 0, 0, 3, 100])))
        s = Sampling(
            max_tokens=n, temperature=rng.choice([0.0, 0.0, 0.1]), seed=rng.randint(0, 9), stop_token_ids=stops,
            min_tokens=rng.choice([0, 0, 1, n // 2, n + 5]), ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, None, 0, 2]))
        name = str(self.n)
        self.n += 1
        try:
            self.core.add(GenerateRequest(name, ids(prompt), s, rng.choice([b"", b"", b"", b"other"])))
        except (ContextLengthError, OverloadedError):
            assert name not in self.core.requests
            return
        self.asked[name] = Asked(prompt, s, *expect(prompt, s))

    def cancel(self) -> None:
        """Anybody, but leaders of flights, preempted ones and waiters before others."""
        rng, scheduler = self.rng, self.core.scheduler
        liked = [f.leader for f in scheduler.flights._open.values() if f.waiters] + [
            r for r in self.core.requests.values() if r.preempted or r.state is State.IN_FLIGHT]
        pool: list[Request] = liked if liked and rng.random() < 0.6 else list(self.core.requests.values())
        if pool:
            self.bench.cancel(rng.choice(pool).id)
            self.check()

    # -- steps -------------------------------------------------------------------------------------------

    def step(self) -> None:
        before = self.runner.computed
        self.bench.clock.now += self.rng.choice([0.0, 0.001, 0.01, 1.0])
        deltas: list[Delta] = []
        try:
            deltas = self.core.step()
        except RuntimeError as error:
            deltas = self.core.fail_running(error)
            assert deltas
        self.bench.keep(deltas)
        worked = self.runner.computed > before or bool(deltas)
        self.idle = 0 if worked or not self.core.has_work() else self.idle + 1
        assert self.idle <= IDLE_STEPS, f"{self.idle} steps did nothing: {self.core.stats()['requests']}"
        self.check()

    def check(self) -> None:
        assert self.core.audit() == []
        slots, scheduler = self.core.cache.slots, self.core.scheduler
        assert len(scheduler.running) <= self.what["running"]
        assert sum(len(r.ids) // 4 for r in self.runner.rows) <= self.what["step_tokens"]
        assert {r.id for r in scheduler.running} | {r.id for r in scheduler.waiting} | {
            w.id for f in scheduler.flights._open.values() for w in f.waiters} == set(self.core.requests)
        for flight in scheduler.flights._open.values():
            assert flight.leader.state is State.RUNNING
        first = [r.preempted > 0 for r in scheduler.waiting]
        assert first == sorted(first, reverse=True), "who was preempted goes before all others"
        for r in scheduler.running:
            assert 0 <= r.computed < r.n_tokens
            assert len(r.table) * self.what["size"] >= r.computed
        for slot in set(range(slots.capacity)) - slots.used():
            self.runner.pool[slot] = EMPTY  # who reads what is free is found out

    def run(self, turns: int) -> None:
        rng = self.rng
        for _ in range(turns):
            what = rng.random()
            if what < 0.35:
                self.add()
            elif what < 0.40:
                same = self.prompt()
                for _ in range(rng.randint(2, 6)):
                    self.add(same)
            elif what < 0.48:
                self.cancel()
            else:
                for _ in range(rng.choice([1, 1, 2, 5, 30])):
                    self.step()
        left = sum(len(a.prompt) + a.sampling.max_tokens for a in map(self.asked.__getitem__, self.core.requests))
        for _ in range(20 * left + 100):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "it does not end"
        self.verdict()

    def verdict(self) -> None:
        core, cache = self.core, self.core.cache
        assert cache.available() == cache.slots.capacity
        assert cache.tree.leases() == []
        assert core.scheduler.waiting == [] == core.scheduler.running
        assert len(core.scheduler.flights) == 0
        total = Usage()
        computed: dict[str, int] = {}
        for name, asked in self.asked.items():
            self._judge(name, asked)
            usage = self.bench.last[name].usage
            assert usage is not None
            total.prompt_tokens += usage.prompt_tokens
            total.completion_tokens += usage.completion_tokens
            total.cached["hbm"] += usage.cached["hbm"]
            for reason, n in usage.computed.items():
                computed[reason] = computed.get(reason, 0) + n
        tokens = core.counters.tokens(core.tiers)
        assert (tokens["prompt"], tokens["generated"], tokens["cached"]["hbm"]) == (
            total.prompt_tokens, total.completion_tokens, total.cached["hbm"])
        assert tokens["computed"] == computed
        counted = core.counters.requests()
        assert sum(counted.values()) == len(self.asked)
        assert len(cache.tree._ghosts) <= self.what["ghosts"]

    def _judge(self, name: str, asked: Asked) -> None:
        got, last = self.bench.got[name], self.bench.last[name]
        assert got == asked.expected[:len(got)], (name, got, asked.expected)
        assert last.usage is not None
        usage = last.usage
        parts = usage.cached_tokens + sum(usage.computed.values())
        assert parts == usage.prompt_tokens
        assert usage.prompt_tokens == len(asked.prompt) or (
            usage.prompt_tokens == 0 and last.finish in ("cancelled", "error"))
        assert all(n > 0 for n in usage.computed.values())
        assert usage.completion_tokens == len(got) + (last.finish == "stop")
        if last.finish == "stop":
            assert got == asked.expected
            assert last.stop_token == asked.stop_token
        elif last.finish == "length":
            n, w = len(asked.prompt) + len(got), self.what
            full = n >= w["context"] or n > w["size"] * w["slots"] - 1
            assert full or (asked.stop_token is None and len(got) == asked.sampling.max_tokens)
