"""Room in HBM and in RAM: what the tree lets go is copied down first where no copy lies below.

    HBM victim ─┬─ a partial tail, or a copy lies below ──────────────────► its slot is free at once
                ├─ dirty, and waiting costs less than computing it again ──► leaving ──(copy landed)──► free
                └─ dirty otherwise ────────────────────────────────────────► forgotten, counted `dirty`

So that few have to wait, what would leave next is copied ahead (`tend`). It executes the tree's order and never
makes one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.core.moves import BELOW, HBM, IN_HBM, IN_NVME, IN_RAM, NVME, RAM, Moves

if TYPE_CHECKING:
    from engine.core.persist import Persist
    from radix import RadixTree, Victim
    from tiers import Landed

#: Copies to RAM under way that were begun ahead of need: bounds what a burst of steps can queue.
MOST_AHEAD = 64
#: How many of RAM's next victims are kept clean.
RAM_AHEAD = 32
#: Evictions after which the next victims are looked at again (a look costs some 20 µs a victim).
LOOK_EVERY = 8

SPACE, DIRTY, FAILED = "space", "dirty", "spill_failed"


class Spills:
    """Victims of HBM and RAM, and their copies. `ahead`: how many of HBM's next victims are kept clean.

    `recompute_s(tokens)`, set by the core: the seconds that computing them again is predicted to take.
    """

    def __init__(self, tree: RadixTree, moves: Moves, persist: Persist | None, *, ahead: int,
                 block_bytes: int) -> None:
        self._tree = tree
        self._moves = moves
        self._persist = persist
        self._ahead = ahead
        self._block_bytes = block_bytes
        self.recompute_s: Callable[[int], float] = lambda tokens: math.inf
        self._hbm = moves.slots(HBM)
        self._ram = moves.slots(RAM) if moves.store.ram is not None else None
        #: Victims whose slot waits for a copy below: block -> slot.
        self.leaving: dict[int, int] = {}
        self._copying: set[int] = set()      # blocks on their way to RAM
        self._no_ram: dict[int, int] = {}    # leaving, and RAM had no slot for them yet
        self._cleaning = False               # RAM's next victim is being written, for who waits in `_no_ram`
        self._refused: dict[int, int] = {}   # in RAM, and NVMe has no room for them: block -> birth
        self._evicted = 0                    # since the last look ahead

    # -- room in HBM -------------------------------------------------------------------------------------

    def make_room(self, n: int) -> None:
        """So many free slots in HBM, now or when what is leaving has landed; nothing is evicted where that can't be
        reached."""
        missing = n - self._hbm.free_count - len(self.leaving)
        if missing > self._tree.evictable(HBM):
            return
        while missing > 0:
            victims = self._tree.victims(HBM, missing)
            if not victims:
                return
            self._evicted += len(victims)
            self._let_go(victims)
            missing = n - self._hbm.free_count - len(self.leaving)

    def _let_go(self, victims: Iterable[Victim]) -> None:
        clean, dirty = [], []
        for victim in victims:
            if victim.n_tokens < self._tree.block_size or self._tree.where(victim.block) & BELOW:
                clean.append(victim)
            elif self._worth_waiting(victim.n_tokens):
                self.leaving[victim.block] = victim.slot
                self._copy_down(victim.block, victim.slot)
            else:
                dirty.append(victim)
        self._drop(clean, SPACE)
        self._drop(dirty, DIRTY)

    def _drop(self, victims: list[Victim], reason: str) -> None:
        if victims:
            self._hbm.free([v.slot for v in victims])
            self._tree.dropped(HBM, [v.block for v in victims], reason=reason)

    def _worth_waiting(self, n_tokens: int) -> bool:
        """Whether the copy is predicted to be there before the tokens could be computed again."""
        store = self._moves.store
        target = RAM if self._ram is not None else NVME
        if target == NVME and (self._persist is None or not self._persist.can_write()):
            return False
        speed = store.speed(HBM, target)
        if not speed:
            return True
        return (store.queued_bytes(HBM, target) + self._block_bytes) / speed < self.recompute_s(n_tokens)

    # -- copies ------------------------------------------------------------------------------------------

    def _copy_down(self, block: int, slot: int) -> None:
        """One that is leaving: to RAM, else to NVMe (which brings its parents along)."""
        if self._ram is None:
            assert self._persist is not None
            self._persist.urgent(block)
        elif block not in self._copying and not self._to_ram(block, slot, force=True):
            self._no_ram[block] = slot

    def _to_ram(self, block: int, slot: int, *, force: bool) -> bool:
        taken = self._take_ram(force=force)
        if taken is None:
            return False
        self._copying.add(block)
        born = self._tree.born(block)

        def landed(end: Landed) -> None:
            self._copying.discard(block)
            self.land_in_ram(end, block, born)
            if self._tree.is_still(block, born):
                self.settle(block, FAILED if end.failed is not None else SPACE)

        self._moves.begin((HBM, slot), (RAM, taken), landed)
        return True

    def land_in_ram(self, end: Landed, block: int, born: int) -> None:
        """A copy to RAM has ended: the block is there now, if it is known still and not there already."""
        assert self._ram is not None
        slot = end.target.slot
        if end.failed is not None:
            self._ram.abort((slot,))
        elif self._tree.is_still(block, born) and not self._tree.where(block) & IN_RAM:
            self._tree.placed(RAM, [block], [slot])
        else:
            self._ram.free((slot,))

    def settle(self, block: int, reason: str = SPACE) -> None:
        """A copy of the block has ended: if it was leaving HBM, its slot is free now."""
        slot = self.leaving.pop(block, None)
        if slot is None:
            return
        self._no_ram.pop(block, None)
        self._hbm.free((slot,))
        self._tree.dropped(HBM, [block], reason=SPACE if self._tree.where(block) & BELOW else reason)

    def settle_persisted(self, block: int) -> None:
        """The block is on NVMe, or will not get there now."""
        if self._ram is None or self._tree.where(block) & IN_NVME:
            self.settle(block, DIRTY)  # whatever it waited for: it could be restored from now on
        else:
            if len(self._refused) >= self._ram.capacity:
                self._refused.clear()  # of blocks that are long gone, most of them
            self._refused[block] = self._tree.born(block)

    # -- room in RAM -------------------------------------------------------------------------------------

    def _take_ram(self, *, force: bool) -> int | None:
        """A slot of RAM. Who leaves it has a copy elsewhere, or there is nowhere to put one; a dirty one is written
        first (with `force`) and its slot can be had later."""
        assert self._ram is not None
        self._cleaning = False
        while not self._ram.free_count:
            victims = self._tree.victims(RAM, 1)
            if not victims:
                return None
            (victim,) = victims
            dirty = not self._tree.where(victim.block) & (IN_HBM | IN_NVME)
            if dirty and self._can_be_written(victim.block):
                self._tree.kept(RAM, [victim.block])
                if force:
                    self._persist.urgent(victim.block)  # type: ignore[union-attr]
                    self._cleaning = True
                return None
            self._ram.free((victim.slot,))
            self._tree.dropped(RAM, [victim.block], reason=DIRTY if dirty and self._persist is not None else SPACE)
        taken = self._ram.take(1)
        assert taken is not None
        return taken[0]

    def _can_be_written(self, block: int) -> bool:
        """Whether NVMe takes it: not where it was refused since, for want of room or a disk that works."""
        born = self._refused.pop(block, None)
        return (self._persist is not None and self._persist.can_write()
                and (born is None or not self._tree.is_still(block, born)))

    def take_ram_clean(self) -> int | None:
        """A slot of RAM for a block that is only looked ahead for: nothing is written for it."""
        return self._take_ram(force=False) if self._ram is not None else None

    # -- ahead of need -----------------------------------------------------------------------------------

    def tend(self) -> None:
        """Between two steps: retry what found no slot in RAM, and copy ahead what would leave next."""
        for block, slot in list(self._no_ram.items()):
            if self._to_ram(block, slot, force=True):
                del self._no_ram[block]
            elif self._cleaning or self._moves.pending():
                break  # a slot will come
            else:
                self.settle(block, DIRTY)
        if self._ram is None and self.leaving and self._persist is not None and not self._persist.can_write():
            for block in [b for b in self.leaving if not self._persist.flies(b)]:
                self.settle(block, DIRTY)
        if self._hbm.free_count < self._ahead and self._evicted >= LOOK_EVERY:
            self._evicted = 0
            self._copy_ahead()

    def look_again(self) -> None:
        """What would leave next may have changed (a request has ended)."""
        self._evicted = LOOK_EVERY

    def _copy_ahead(self) -> None:
        for victim in self._tree.coming(HBM, self._ahead):
            if victim.n_tokens < self._tree.block_size:
                continue
            where = self._tree.where(victim.block)
            if self._ram is None:
                if not where & BELOW and self._persist is not None:
                    self._persist.urgent(victim.block)
                continue
            if len(self._copying) >= MOST_AHEAD:
                break
            if not (where & IN_RAM or victim.block in self._copying
                    or self._to_ram(victim.block, victim.slot, force=False)):
                break
        if self._ram is not None and self._persist is not None and self._ram.free_count < RAM_AHEAD:
            for victim in self._tree.coming(RAM, RAM_AHEAD):
                if not self._tree.where(victim.block) & (IN_HBM | IN_NVME):
                    self._persist.urgent(victim.block)
