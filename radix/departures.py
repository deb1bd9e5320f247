"""What has left a tier: counted, a ghost if that was its last tier, and forgotten when its ghost expires.

Who may leave is residence.py's rule; this is what comes after. It knows no order of leaving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radix.ages import Ages
from radix.blocks import Blocks
from radix.edges import Edges
from radix.errors import ResidenceError
from radix.ghosts import Ghost, Ghosts
from radix.node import Node, Nodes, Root
from radix.residence import TOP, Residence
from radix.tails import Tails
from radix.wanted import Wanted


class Departures:
    """See the module. `roots` are the tree's: an empty one goes."""

    def __init__(
        self,
        blocks: Blocks,
        nodes: Nodes,
        roots: dict[bytes, Root],
        residence: Residence,
        edges: Edges,
        tails: Tails,
        ghosts: Ghosts,
        wanted: Wanted,
        clock: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._nodes = nodes
        self._roots = roots
        self._residence = residence
        self._edges = edges
        self._tails = tails
        self._ghosts = ghosts
        self._wanted = wanted
        self._clock = clock
        self._ages = [Ages() for _ in residence.tiers]
        self._by_reason: list[dict[str, int]] = [{} for _ in residence.tiers]

    def drop(self, t: int, blocks: Iterable[int], reason: str) -> None:
        """They are in the tier no more: victims, or others that may leave."""
        now = self._clock()
        ghost = Ghost(now, self._residence.tiers[t], reason)
        residence, ages, wanted = self._residence, self._ages[t], self._wanted
        n = 0
        for block in blocks:
            if not residence.left(t, block):
                self._leave_unasked(t, block)
            n += 1
            ages.add(now - residence.last_use(block))
            wanted.dropped(t, block)
            if not residence.is_anywhere(block):
                for forgotten in self._ghosts.add(block, ghost):
                    self._forget(forgotten)
        by_reason = self._by_reason[t]
        by_reason[reason] = by_reason.get(reason, 0) + n

    def _leave_unasked(self, t: int, block: int) -> None:
        tier = self._residence.tiers[t]
        if not self._blocks.resident[block] & (1 << t):
            raise ResidenceError(f"block {block} is not in {tier}")
        if self._residence.is_leased(block):
            raise ResidenceError(f"block {block} is leased: it can't be dropped from {tier}")
        if t == TOP and self._residence.has_child(t, block):
            raise ResidenceError(f"block {block} can't leave {tier} before its children do")
        self._residence.leave(t, block)

    def _forget(self, block: int) -> None:
        """A ghost has expired."""
        node = self._nodes[self._blocks.node[block]]
        is_tail = node.is_tail
        root = self._edges.prune(block)
        self._tails.count -= is_tail
        if root is not None:
            self.drop_if_empty(root)

    def uncovered(self, block: int) -> None:
        """No longer under a lease that kept a block known which may have left its last tier meanwhile."""
        if not self._residence.is_anywhere(block) and block not in self._ghosts:
            self._forget(block)

    def drop_if_empty(self, node: Node) -> None:
        """Let go of a root that nothing hangs on."""
        if isinstance(node, Root) and not node.children and node.tail is None:
            del self._roots[node.name]

    def stats(self, t: int) -> dict[str, Any]:
        by_reason = self._by_reason[t]
        return {
            "evictions": sum(by_reason.values()),
            "evicted_by_reason": dict(by_reason),
            "evicted_then_wanted": self._wanted.counts[t],
            "age_at_eviction": self._ages[t].summary(),
        }
