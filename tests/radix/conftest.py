"""Fixtures of the index's tests: a clock that is turned by hand, token runs, and an owner of slots."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import pytest

from radix import Path, RadixTree


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def as_bytes(ids: Iterable[int]) -> bytes:
    run = list(ids)
    return struct.pack(f"<{len(run)}i", *run)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens() -> Callable[[Iterable[int]], bytes]:
    """Token ids as the tree takes them."""
    return as_bytes


class Store:
    """A tree with somebody who hands out slots in order, as the engine's pool does."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.space = tree.namespace(b"model")
        self.next_slot = 0
        self.in_use: set[int] = set()

    def take(self, n: int) -> list[int]:
        slots = list(range(self.next_slot, self.next_slot + n))
        self.next_slot += n
        self.in_use.update(slots)
        return slots

    def match(self, ids: Iterable[int]) -> Path:
        return self.tree.match(self.space, as_bytes(ids))

    def insert(self, ids: Iterable[int]) -> Path:
        """All whole blocks of a sequence; gives back what comes back."""
        run = as_bytes(ids)
        path = self.tree.match(self.space, run)
        stride = 4 * self.tree.block_size
        rest = run[path.n_blocks * stride : len(run) // stride * stride]
        slots = self.take(len(rest) // stride)
        extended = self.tree.extend(path, rest, slots)
        for outcome, slot in zip(extended.outcomes, slots, strict=True):
            if hasattr(outcome, "slot"):
                self.in_use.remove(slot)
        self.in_use.difference_update(extended.freed_slots)
        return extended.path

    def evict(self, n: int, tier: str = "hbm", reason: str = "space") -> list[int]:
        """Ids of the blocks that went."""
        victims = self.tree.victims(tier, n)
        self.tree.dropped(tier, [victim.block for victim in victims], reason)
        self.in_use.difference_update(victim.slot for victim in victims)
        return [victim.block for victim in victims]

    def audit(self) -> list[str]:
        return self.tree.audit({"hbm": self.in_use})


@pytest.fixture
def store(clock: Clock) -> Store:
    """Blocks of 4 tokens."""
    return Store(RadixTree(4, clock=clock))


@pytest.fixture
def make_store(clock: Clock) -> Callable[..., Store]:
    def make(block_size: int = 4, **options: object) -> Store:
        return Store(RadixTree(block_size, clock=clock, **options))  # type: ignore[arg-type]

    return make
