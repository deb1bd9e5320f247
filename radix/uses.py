"""Uses of paths: what makes blocks young, and what is counted as a hit.

A path that ends behind a whole edge leaves one note on it and on each edge above (`pending_…` in node.py); only
a path that ends inside an edge writes that edge's columns. So a use costs as much as the path has edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from radix.ages import Ages, AgeSummary
from radix.blocks import Blocks, IntArray
from radix.errors import StalePathError
from radix.node import Node, Nodes
from radix.path import Path
from radix.residence import TOP, Residence


class Uses:
    """See the module."""

    def __init__(self, blocks: Blocks, nodes: Nodes, residence: Residence) -> None:
        self._blocks = blocks
        self._nodes = nodes
        self._residence = residence
        self._hits = self._hit_tokens = 0
        self._age_at_hit = [Ages() for _ in residence.tiers]

    def check(self, path: Path) -> None:
        """Raise StalePathError unless the blocks that a path ends in are those it was matched with."""
        self.check_end(path)
        partial = path.partial
        if partial is not None and not self._is_still(partial.block, partial.born):
            raise StalePathError(f"the partial block behind {path.n_tokens} tokens was evicted: match again")

    def check_end(self, path: Path) -> None:
        """The same for the whole blocks alone."""
        if path.end >= 0 and not self._is_still(path.end, path.born):
            raise StalePathError(f"the end of a path of {path.n_tokens} tokens was evicted: match again")

    def check_reach(self, block: int, reach: int) -> None:
        """Raise StalePathError unless the block is in some tier, and the last of so many."""
        if not self._blocks.born[block] or self._blocks.depth[block] + 1 != reach or not (
            self._residence.is_anywhere(block)
        ):
            raise StalePathError(f"the end of {reach} blocks to be reached was evicted: match again")

    def _is_still(self, block: int, born: int) -> bool:
        return self._blocks.born[block] == born and bool(self._blocks.resident[block] & (1 << TOP))

    def count(self, path: Path, now: float) -> None:
        """A hit, if anything of the path is reused."""
        if not path.reusable_tokens:
            return
        self._hits += 1
        self._hit_tokens += path.reusable_tokens
        last = path.partial.block if path.partial is not None and path.end < 0 else path.end
        self._age_at_hit[TOP].add(now - self._residence.last_use(last))

    def count_below(self, ids: IntArray, now: float) -> None:
        """A hit reads these from lower tiers: an age for each tier, that of the last block read from it."""
        bits = self._blocks.resident_v[ids]
        highest = bits & -bits
        for tier in range(TOP + 1, len(self._age_at_hit)):
            there = np.flatnonzero(highest == 1 << tier)
            if len(there):
                self._age_at_hit[tier].add(now - self._residence.last_use(int(ids[there[-1]])))

    def age_at_hit(self, tier: int) -> AgeSummary:
        """How old it was what counted leases read from the tier: one sample each."""
        return self._age_at_hit[tier].summary()

    def touch(self, path: Path, now: float, uses: int) -> None:
        """All blocks of the path were used now, by `uses` more requests."""
        blocks = self._blocks
        partial = path.partial
        if partial is not None and self._is_still(partial.block, partial.born):
            blocks.last_use[partial.block] = now
            blocks.uses[partial.block] += uses
        if path.end < 0:
            return
        node: Node | None = self._nodes[blocks.node[path.end]]
        assert node is not None
        at = blocks.depth[path.end] + 1 - node.start
        if at < node.n:
            ids = node.blocks[:at]
            blocks.last_use_v[ids] = now
            blocks.uses_v[ids] += uses
            node = node.parent
        while node is not None:
            node.pending_use = now
            node.pending_uses += uses
            node = node.parent

    def stats(self) -> dict[str, Any]:
        return {
            "hits": self._hits,
            "hit_tokens": self._hit_tokens,
            "age_at_hit": self.age_at_hit(TOP),
        }
