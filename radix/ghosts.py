"""Ghosts: what was forgotten, when, from where and why, so that a miss can be explained.

A ghost is a block that the tree still knows (its tokens stay in their edge, so a ghost is proved by comparing
tokens like everything else) and that is resident nowhere. Their number is bounded; the oldest goes first, and
then the tree lets go of its tokens too. Since tails are evicted first, the oldest ghosts of a path are its
deepest, and letting go cuts edges from their ends.
"""

from __future__ import annotations

from typing import NamedTuple


class Ghost(NamedTuple):
    """`when` it went (clock, seconds), from which tier (its last one), and why."""

    when: float
    tier: str
    reason: str


class Ghosts:
    """At most `limit` ghosts, by block id, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_block: dict[int, Ghost] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def get(self, block: int) -> Ghost | None:
        return self._by_block.get(block)

    def blocks(self) -> list[int]:
        return list(self._by_block)

    def add(self, block: int, ghost: Ghost) -> list[int]:
        """Remember; returns the blocks that fell off the end, oldest first (with limit 0, this one)."""
        self._by_block[block] = ghost
        expired = []
        while len(self._by_block) > self.limit:
            oldest = next(iter(self._by_block))
            del self._by_block[oldest]
            expired.append(oldest)
        return expired

    def discard(self, block: int) -> None:
        """The block was computed or loaded again, or goes from the tree for another reason than age."""
        self._by_block.pop(block, None)
