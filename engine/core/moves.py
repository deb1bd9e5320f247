"""Copies of blocks between tiers, begun and reported: who begins one says who is to be told of its end.

It knows how a block is named on disk, and which copies are under way. It does not know why a block is moved, and
changes nothing in the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tiers import Landed, Place, RecordName, SlotAllocator, TieredStore

if TYPE_CHECKING:
    from radix import Path, RadixTree

HBM, RAM, NVME = TIERS = ("hbm", "ram", "nvme")
#: A block's residence bits, in the order of TIERS.
IN_HBM, IN_RAM, IN_NVME = 1, 2, 4
BELOW = IN_RAM | IN_NVME

Then = Callable[[Landed], None]


class Moves:
    """The store's desk, for a tree of TIERS."""

    def __init__(self, tree: RadixTree, store: TieredStore) -> None:
        self._tree = tree
        self.store = store
        self._then: dict[int, Then] = {}
        self._serial = 0

    def slots(self, tier: str) -> SlotAllocator:
        return self.store.slots(tier)

    def begin(self, source: tuple[str, int], target: tuple[str, int], then: Then,
              name: RecordName | None = None) -> None:
        """One block from `source` (tier, slot) to `target`, whose slot the caller has taken. `name`: what a record
        on disk is to be, or is expected to be."""
        self._serial += 1
        self._then[self._serial] = then
        self.store.begin(self._serial, Place(*source), Place(*target), name)

    def poll(self) -> int:
        """Tell everybody whose copy has ended; returns how many have. Never blocks."""
        landed = self.store.poll()
        for each in landed:
            self._then.pop(each.key)(each)
        return len(landed)

    def pending(self) -> int:
        return len(self._then)

    def name(self, path: Path, i: int) -> RecordName:
        """What the record of block `i` of `path.known` says that it is."""
        return RecordName(path.namespace.root, self._tree.digest(path, i), self._tree.digest(path, i - 1), i,
                          self._tree.tokens(int(path.known[i])))
