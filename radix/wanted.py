"""Evicted, then wanted: what a tier let go of and was asked for again. What it had kept would have been read there.

A bit a tier in the column `missed` says that a block left the tier and was not wanted since. It is counted, once, when
the block comes back to that tier, or is read from further down, or is computed again:

    missed     hbm ram nvme        lies in     wanted     counted for
               x   x    .          nvme        read       hbm, ram
               x   x    .          nowhere     computed   hbm, ram
               .   x    .          hbm         read       nobody: ram was not missed
               .   x    .          hbm         spilled    ram: it is copied there a second time
"""

from __future__ import annotations

import numpy as np

from radix.blocks import Blocks, IntArray
from radix.residence import TOP


class Wanted:
    """The bits and the counts."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.counts = [0] * blocks.n_tiers

    def dropped(self, tier: int, block: int) -> None:
        """The block has left the tier."""
        if self._blocks.resident[block] & (1 << tier):
            self.counts[tier] += 1  # it was computed again before its old slot was reported
        else:
            self._blocks.missed[block] |= 1 << tier

    def read(self, ids: IntArray) -> None:
        """They are read from where they lie now, or computed again if that is nowhere."""
        missed = self._blocks.missed_v[ids]
        if not missed.any():
            return
        bits = self._blocks.resident_v[ids]
        missed &= (bits & -bits) - np.uint8(1)  # tiers above the highest that it is in; all of them for none
        self._blocks.missed_v[ids] ^= missed
        for tier in range(len(self.counts)):
            self.counts[tier] += int(np.count_nonzero(missed & (1 << tier)))

    def placed(self, tier: int, block: int, was_in: int) -> None:
        """The block has come to the tier; `was_in`: its bits before. A copy further down asks for no tier above."""
        missed = self._blocks.missed[block]
        if not missed:
            return
        seen = missed & ((was_in & -was_in) - 1 if tier == TOP else 1 << tier)
        self._blocks.missed[block] = missed ^ seen
        for t in range(len(self.counts)):
            self.counts[t] += seen >> t & 1
