"""Who is in which tier: the bits, the slots, the counts kept in nodes, and who may leave.

The one place that writes residence. It takes single facts ("these blocks are in this tier now, in these
slots", "this one is leaving") from the tree, and keeps with them, for each tier:

    total[t]     blocks that are there and can be matched
    leased[t]    of those, the ones under a lease
    holes[t]     blocks that are not there, and a child of theirs is (`lost` leaves them; counted below the top
                 in tiers that are not spare, since there nothing else does)
    leaving[t]   chosen to leave, their slot still in use: block id -> slot. Such a block may be adopted again
                 in another slot; it is no candidate until its old one is reported

**Candidates.** A block may leave a tier if it is there, is not leased, and has no child there. In a tier whose
copies are worth less than the top tier's (`spare`: RAM), one that is also in the top tier may leave too, and
goes first. Since the top tier's blocks leave from the tails only, it stays prefix-closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radix.blocks import Blocks, IntArray
from radix.errors import ArgumentError
from radix.eviction import Candidates, Facts, Key, Policy
from radix.node import Node, Nodes

TOP = 0
_IN_TOP = 1 << TOP


class Residence:
    """See the module."""

    def __init__(
        self,
        blocks: Blocks,
        nodes: Nodes,
        tiers: Sequence[str],
        spare: Sequence[str],
        policy: Policy,
    ) -> None:
        self.blocks = blocks
        self.nodes = nodes
        self.tiers = tuple(tiers)
        self.policy = policy
        self._spare = tuple(name in spare for name in tiers)
        self._lower = range(1, len(tiers))
        self.total = [0] * len(tiers)
        self.leased = [0] * len(tiers)
        self.holes = [0] * len(tiers)
        self.counts_holes = tuple(t != TOP and not spare for t, spare in enumerate(self._spare))
        self.leaving: list[dict[int, int]] = [{} for _ in tiers]
        self.heaps = [Candidates(tier, blocks, self.is_candidate, self.key) for tier in range(len(tiers))]

    def index(self, tier: str) -> int:
        """The number of a tier, by its name."""
        try:
            return self.tiers.index(tier)
        except ValueError:
            raise ArgumentError(f"no tier {tier!r}: this tree has {', '.join(self.tiers)}") from None

    # -- what may leave, and in which order

    def is_candidate(self, tier: int, block: int) -> bool:
        bit = 1 << tier
        bits = self.blocks.resident
        if not bits[block] & bit or block in self.leaving[tier]:
            return False
        node = self.nodes[self.blocks.node[block]]
        at = self.blocks.depth[block] - node.start
        if at < node.covered:
            return False
        if self._spare[tier] and bits[block] & _IN_TOP:
            return True
        if at + 1 < node.n:
            return not bits[node.blocks[at + 1]] & bit
        return not node.kids[tier]

    def key(self, tier: int, block: int) -> Key:
        """The block's place in the order of leaving, as of now."""
        facts = self.facts(block)
        first = self.nodes[self.blocks.node[block]].doomed or (
            self._spare[tier] and self.blocks.resident[block] & _IN_TOP
        )
        return 0 if first else 1, self.policy(facts), -facts.depth

    def facts(self, block: int) -> Facts:
        """What the policy sees: columns, and what the block's edge has pending."""
        blocks = self.blocks
        node = self.nodes[blocks.node[block]]
        last_use = blocks.last_use[block]
        if node.pending_use > last_use:
            last_use = node.pending_use
        uses = blocks.uses[block] + node.pending_uses
        return Facts(last_use, uses, blocks.born[block], blocks.depth[block])

    def last_use(self, block: int) -> float:
        return max(self.blocks.last_use[block], self.nodes[self.blocks.node[block]].pending_use)

    def has_child(self, tier: int, block: int) -> bool:
        """Whether a block right behind this one is resident in the tier."""
        node = self.nodes[self.blocks.node[block]]
        at = self.blocks.depth[block] - node.start
        if at + 1 < node.n:
            return bool(self.blocks.resident[node.blocks[at + 1]] & (1 << tier))
        return bool(node.kids[tier])

    def is_leased(self, block: int) -> bool:
        node = self.nodes[self.blocks.node[block]]
        return self.blocks.depth[block] - node.start < node.covered

    # -- changes

    def place(self, tier: int, node: Node, first: int, last: int, slots: IntArray) -> None:
        """node.blocks[first:last], none of them there yet, are in the tier from now on."""
        ids = node.blocks[first:last]
        self.blocks.put(tier, ids, slots)
        if self.counts_holes[tier]:
            self.holes[tier] += self._holes_made(tier, node, first, last)
        node.resident[tier] += last - first
        self.total[tier] += last - first
        self.leased[tier] += max(0, min(last, node.covered) - first)
        if first == 0 and node.parent is not None:
            node.parent.kids[tier] += 1
        self._offer_placed(tier, ids)

    def _holes_made(self, tier: int, node: Node, first: int, last: int) -> int:
        """By which number of holes a tier with node.blocks[first:last] differs from one without them. To be asked
        while the parent's `kids` do not count them."""
        before = node
        siblings = 0
        if first == 0 and node.parent is not None:
            before = node.parent
            siblings = before.kids[tier]
            first = before.n
        opens = first > 0 and not siblings and not self.blocks.resident[before.blocks[first - 1]] & (1 << tier)
        return opens - self.has_child(tier, int(node.blocks[last - 1]))

    def _offer_placed(self, tier: int, ids: IntArray) -> None:
        if self._spare[tier]:
            for block in ids.tolist():
                self.offer(tier, block)
        else:
            self.offer(tier, int(ids[-1]))  # each of the others has a child there
        if tier == TOP:
            for lower in self._lower:
                if self._spare[lower]:  # they have just become copies
                    there = ids[(self.blocks.resident_v[ids] & (1 << lower)) != 0]
                    for block in there.tolist():
                        # Under a lease it is offered when that ends: as what it is then, not by an older entry.
                        self.blocks.queued[block] &= ~(1 << lower)
                        self.offer(lower, block, again=True)

    def leave(self, tier: int, block: int) -> int:
        """The block is not in the tier any more; returns the slot it had. Its parent may be a candidate now."""
        node = self.nodes[self.blocks.node[block]]
        at = self.blocks.depth[block] - node.start
        slot = self.blocks.slot[tier][block]
        self.blocks.resident[block] ^= 1 << tier
        self.blocks.slot[tier][block] = -1
        node.resident[tier] -= 1
        self.total[tier] -= 1
        if at < node.covered:
            self.leased[tier] -= 1
        before, behind = node, at
        if at == 0 and node.parent is not None:
            before = node.parent
            before.kids[tier] -= 1
            behind = before.n
        if self.counts_holes[tier]:
            self.holes[tier] -= self._holes_made(tier, node, at, at + 1)
        if behind > 0:
            self.offer(tier, int(before.blocks[behind - 1]))
        return slot

    def cover(self, node: Node, covered: int) -> None:
        """The first `covered` blocks of a node are under a lease from now on, and no others."""
        before, node.covered = node.covered, covered
        top = node.resident[TOP]
        self.leased[TOP] += min(covered, top) - min(before, top)
        if self._lower:
            low, high = min(before, covered), max(before, covered)
            for tier in self._lower:
                n = self.blocks.count(node.blocks[low:high], tier)
                self.leased[tier] += n if covered > before else -n
        if covered < before:
            self._offer_uncovered(node, covered, before)

    def _offer_uncovered(self, node: Node, low: int, high: int) -> None:
        last = node.resident[TOP] - 1
        if last >= low and not node.kids[TOP]:
            self.offer(TOP, int(node.blocks[last]), again=node.doomed)
        for tier in self._lower:
            ids = node.blocks[low:high]
            bit = np.uint8(1 << tier)
            waiting = ids[(self.blocks.resident_v[ids] & ~self.blocks.queued_v[ids] & bit) != 0]
            for block in waiting.tolist():
                self.offer(tier, block)

    def settle(self) -> None:
        """Keep the tops of the heaps clean, a few entries at a time."""
        for heap in self.heaps:
            heap.settle()

    def offer(self, tier: int, block: int, *, again: bool = False) -> None:
        if self.is_candidate(tier, block):
            self.heaps[tier].offer(block, again=again)

    # -- the two steps of leaving

    def choose(self, tier: int, n: int) -> list[tuple[int, int]]:
        """Up to `n` (block, slot) that go first; they are leaving from now on and are not matched any more."""
        chosen: list[tuple[int, int]] = []
        heap = self.heaps[tier]
        while len(chosen) < n and (block := heap.pop()) is not None:
            slot = self.leave(tier, block)
            self.leaving[tier][block] = slot
            chosen.append((block, slot))
        return chosen

    def coming(self, tier: int, n: int) -> list[tuple[int, int]]:
        """What `choose` would choose, and as if it had not. Only obsolete entries of the heap may come and go."""
        heap = self.heaps[tier]
        pops = heap.pops
        chosen = self.choose(tier, n)
        for block, slot in reversed(chosen):
            self._unchoose(tier, block, slot)
        for block, _ in chosen:
            self.offer(tier, block)  # a parent of another is no candidate any more
        heap.pops = pops
        return chosen

    # Not by `place`: copies below are what they were, and need not be offered again.
    def _unchoose(self, tier: int, block: int, slot: int) -> None:
        """In the opposite order of choosing."""
        del self.leaving[tier][block]
        node = self.nodes[self.blocks.node[block]]
        at = self.blocks.depth[block] - node.start
        self.blocks.resident[block] |= 1 << tier
        self.blocks.slot[tier][block] = slot
        if self.counts_holes[tier]:
            self.holes[tier] += self._holes_made(tier, node, at, at + 1)
        node.resident[tier] += 1
        self.total[tier] += 1
        if at == 0 and node.parent is not None:
            node.parent.kids[tier] += 1

    def left(self, tier: int, block: int) -> bool:
        """The block's leaving is done. False if it was not leaving."""
        if self.leaving[tier].pop(block, None) is None:
            return False
        if self.blocks.resident[block] & (1 << tier):  # it was adopted again meanwhile, in another slot
            self.offer(tier, block)
        return True

    def is_anywhere(self, block: int) -> bool:
        """In some tier, or on its way out of one."""
        if self.blocks.resident[block]:
            return True
        for leaving in self.leaving:  # noqa: SIM110 - a generator costs as much as all the rest of an eviction
            if block in leaving:
                return True
        return False
