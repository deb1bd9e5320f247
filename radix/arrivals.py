"""Known blocks that come to a tier: a spill or a restore has landed, or a victim stays after all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from radix import lookup
from radix.blocks import Blocks
from radix.errors import ResidenceError
from radix.ghosts import Ghosts
from radix.node import Nodes
from radix.residence import TOP, Residence
from radix.tails import Tails
from radix.wanted import Wanted


class Arrivals:
    """Each call returns slots of tails that what came repeats, for the caller to free."""

    def __init__(
        self,
        blocks: Blocks,
        nodes: Nodes,
        residence: Residence,
        tails: Tails,
        ghosts: Ghosts,
        wanted: Wanted,
        stride: int,
    ) -> None:
        self._blocks = blocks
        self._nodes = nodes
        self._residence = residence
        self._tails = tails
        self._ghosts = ghosts
        self._wanted = wanted
        self._stride = stride

    def kept(self, t: int, blocks: Iterable[int]) -> list[int]:
        freed: list[int] = []
        for block in blocks:
            slot = self._residence.leaving[t].get(block)
            if slot is None or self._blocks.resident[block] & (1 << t):
                raise ResidenceError(
                    f"block {block} is not leaving {self._residence.tiers[t]}, or has come back to it"
                )
            self._place(t, block, slot, freed)
        return freed

    def placed(self, t: int, blocks: Sequence[int], slots: Sequence[int]) -> list[int]:
        freed: list[int] = []
        for block, slot in zip(blocks, slots, strict=True):
            was_in = self._blocks.resident[block]
            if was_in & (1 << t):
                raise ResidenceError(f"block {block} is in {self._residence.tiers[t]} already")
            self._place(t, block, slot, freed)
            self._wanted.placed(t, block, was_in)
            self._ghosts.discard(block)
        return freed

    def _place(self, t: int, block: int, slot: int, freed: list[int]) -> None:
        node = self._nodes[self._blocks.node[block]]
        at = self._blocks.depth[block] - node.start
        parent = node.parent
        top = self._residence.tiers[TOP]
        assert parent is not None
        if t == TOP:
            if (parent.resident[TOP] != parent.n) if at == 0 else (node.resident[TOP] != at):
                raise ResidenceError(f"block {block} can't be in {top} before its parent is")
            if node.is_tail:
                node.doomed = lookup.continues(parent, parent.n, node.tokens, self._blocks, self._stride)
            elif at == 0:
                self._tails.retire(parent, node.tokens[: self._stride], slot, freed)
        elif node.is_tail:
            raise ResidenceError(f"block {block} is a partial tail: it lives in {top} only")
        self._residence.leaving[t].pop(block, None)
        self._residence.place(t, node, at, at + 1, np.array([slot], np.int32))
