"""Which block goes next: policies, and one heap of candidates a tier.

A policy is a function from facts to a number; the least goes first. It knows nothing of trees or tiers. What
may go at all is the tree's rule (residence.py); of two with the same value the deeper one goes first.

The heap is lazy. An entry carries the value that the block had when it was put in; a lease or a use does not
touch it. `pop` asks again: who is no candidate any more is thrown out (and offered again by whoever makes it
one), who has become more valuable is put back at its new place. Each use causes at most one such extra pop,
and `settle`, called at each release, pays for it at once, so that an eviction after a quiet hour finds a clean
top. The price of laziness: a policy whose values sink by themselves must `offer(again=True)` what has sunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from radix.blocks import Blocks

_SETTLE = 2  # one for the use that made an entry stale, one to work off what was left before
_COMPACT_AT = 1024  # entries, before obsolete ones are looked for at all


class Facts(NamedTuple):
    """What a policy may look at. Times in seconds of the tree's clock, depth in blocks."""

    last_use: float
    uses: int
    born: int
    depth: int


Policy = Callable[[Facts], float]


def lru(facts: Facts) -> float:
    """Least recently used: the longest unused goes first."""
    return facts.last_use


#: The order of leaving: rank 0 (a copy of what lies above, a tail that a child repeats) goes before rank 1; then
#: the policy's value, then minus the depth.
Key = tuple[int, float, int]


class Candidates:
    """The heap of one tier. `is_candidate` and `key` are asked with (tier, block)."""

    def __init__(
        self,
        tier: int,
        blocks: Blocks,
        is_candidate: Callable[[int, int], bool],
        key: Callable[[int, int], Key],
    ) -> None:
        self._tier = tier
        self._bit = 1 << tier
        self._blocks = blocks
        self._is_candidate = is_candidate
        self._key = key
        self._heap: list[tuple[int, float, int, int, int]] = []  # key, block, born
        self._compact_at = _COMPACT_AT
        self.pops = 0

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, block: int, *, again: bool = False) -> None:
        """A candidate, for the heap; `again` if its value may be lower than when it was offered."""
        blocks = self._blocks
        if blocks.queued[block] & self._bit and not again:
            return
        blocks.queued[block] |= self._bit
        heapq.heappush(self._heap, (*self._key(self._tier, block), block, blocks.born[block]))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> int | None:
        """Take the candidate that goes first; None when there is none."""
        while self._heap:
            block = self._pop_if_current()
            if block is not None:
                return block
        return None

    def settle(self) -> None:
        """Put at most a few obsolete entries at the top in order."""
        for _ in range(_SETTLE):
            if not self._heap:
                return
            rank, value, up, block, born = self._heap[0]
            if (
                self._is_queued(block, born)
                and self._is_candidate(self._tier, block)
                and self._key(self._tier, block) <= (rank, value, up)
            ):
                return
            kept = self._pop_if_current()
            assert kept is None, f"block {kept} was current and is not"

    def entries(self) -> dict[int, Key]:
        """The lowest key by block, of entries that count, for the audit."""
        lowest: dict[int, Key] = {}
        for rank, value, up, block, born in self._heap:
            if self._is_queued(block, born):
                key = (rank, value, up)
                lowest[block] = min(key, lowest.get(block, key))
        return lowest

    def _is_queued(self, block: int, born: int) -> bool:
        return self._blocks.born[block] == born and bool(self._blocks.queued[block] & self._bit)

    def _pop_if_current(self) -> int | None:
        rank, value, up, block, born = heapq.heappop(self._heap)
        self.pops += 1
        if not self._is_queued(block, born):
            return None
        self._blocks.queued[block] &= ~self._bit
        if not self._is_candidate(self._tier, block):
            return None
        if self._key(self._tier, block) > (rank, value, up):
            self.offer(block)
            return None
        return block

    def _compact(self) -> None:
        """Throw out what would be thrown out at its pop. The next time is when the heap has doubled."""
        kept: dict[int, tuple[int, float, int, int, int]] = {}
        for entry in self._heap:
            *_, block, born = entry
            if self._is_queued(block, born) and self._is_candidate(self._tier, block):
                kept[block] = min(entry, kept.get(block, entry))
            elif self._blocks.born[block] == born:
                self._blocks.queued[block] &= ~self._bit
        self._heap = list(kept.values())
        heapq.heapify(self._heap)
        self._compact_at = max(_COMPACT_AT, 2 * len(self._heap))
