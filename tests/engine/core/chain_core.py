"""A core on a runner whose "KV" is a chain of hashes: stale, foreign or missing KV anywhere changes the next token."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.core.core import Core
from engine.core.layout import Rows
from engine.core.messages import Delta, GenerateRequest, Sampling

VOCAB = 997
EMPTY = -1


def ids(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def tokens(raw: bytes) -> list[int]:
    return np.frombuffer(raw, "<i4").tolist()


class Chain:
    """What attention is to a model: each token's state depends on the states of all tokens before it.

    `seen` is a checksum over those states, so one that is stale or foreign, however far back, changes every later one.
    """

    def __init__(self, states: np.ndarray | None = None) -> None:
        self.seen = 0 if states is None else zlib.crc32(np.ascontiguousarray(states, np.int64))
        self.state = 0

    def read(self, token: int) -> int:
        """The state of the next token."""
        self.state = zlib.crc32(token.to_bytes(4, "little"), self.seen)
        self.seen = zlib.crc32(self.state.to_bytes(8, "little"), self.seen)
        return self.state


def cold(prompt: Sequence[int], n: int) -> list[int]:
    """What the chain says comes next, from the tokens alone: the reference."""
    chain, out = Chain(), []
    for token in prompt:
        chain.read(token)
    for _ in range(n):
        out.append(chain.state % VOCAB)
        chain.read(out[-1])
    return out


def logits_of(state: int) -> torch.Tensor:
    """The row of logits behind a state: one token stands out."""
    logits = torch.zeros(VOCAB)
    logits[state % VOCAB] = 1.0
    return logits


class ChainRunner:
    """Writes each token's state into its slot, and reads those of all tokens before it, through block tables alone."""

    def __init__(self, slots: int, block_size: int) -> None:
        self.size = block_size
        self.pool = np.full((slots, block_size), EMPTY, np.int64)
        self.rows: list[Rows] = []
        self.computed = 0
        self.steps = 0
        self.fail_at: int | None = None

    def execute(self, batch: list[Rows]) -> torch.Tensor:
        self.steps += 1
        if self.fail_at == self.steps:
            raise RuntimeError("the device is on fire")
        self.rows = list(batch)
        wanted = []
        for rows in batch:
            assert len(rows.ids) == 4 * rows.n
            self.computed += rows.n
            chain = Chain(self._read(rows))
            for i, token in enumerate(tokens(rows.ids)):
                at = rows.start + i
                self.pool[rows.table[at // self.size], at % self.size] = chain.read(token)
            if rows.logits:
                wanted.append(logits_of(chain.state))
        return torch.stack(wanted) if wanted else torch.empty(0, VOCAB)

    def _read(self, rows: Rows) -> np.ndarray:
        """The states of all tokens before the row's, through its block table."""
        blocks = -(-rows.start // self.size)
        states = self.pool[rows.table[:blocks]].ravel()[:rows.start]
        assert EMPTY not in states, f"read a position before {rows.start} that was never written"
        return states

    def copy_slot(self, source: int, target: int) -> None:
        self.pool[target] = self.pool[source]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A core, its parts, and what it answered."""

    core: Core
    runner: ChainRunner
    clock: Clock
    got: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, Delta] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], n: int = 4, *, namespace: bytes = b"",
            **sampling: object) -> None:
        options = {"max_tokens": n, "temperature": 0.0, **sampling}
        self.core.add(GenerateRequest(name, ids(prompt), Sampling(**options), namespace))  # type: ignore[arg-type]

    def keep(self, deltas: list[Delta]) -> None:
        for d in deltas:
            self.got.setdefault(d.id, []).extend(tokens(d.ids))
            if d.finish:
                self.last[d.id] = d

    def step(self) -> list[Delta]:
        self.clock.now += 0.01
        deltas = self.core.step()
        self.keep(deltas)
        problems = self.core.audit()
        assert problems == [], problems
        for r in self.core.scheduler.running:
            assert r.restore or r.n_tokens - 1 <= r.computed <= r.n_tokens or r.remaining > 1
            assert len(r.table) * self.runner.size >= r.computed
        return deltas

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {steps} steps")

    def ask(self, name: str, prompt: Sequence[int], n: int = 4, **more: object) -> list[int]:
        self.add(name, prompt, n, **more)  # type: ignore[arg-type]
        self.run()
        return self.got[name]

    def cancel(self, name: str) -> None:
        delta = self.core.cancel(name)
        assert delta is not None
        self.keep([delta])

    def usage(self, name: str) -> dict[str, int]:
        usage = self.last[name].usage
        assert usage is not None
        return {"hbm": usage.cached["hbm"], **usage.computed}
