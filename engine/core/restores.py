"""Restores: runs of blocks on their way up into HBM for a request that was admitted, and into RAM for one that
still waits (look-ahead).

A restore is a thing of its own: it has a lease on what it moves, and goes on to its end when its request goes away,
so that whoever waited for the same blocks finds them. Blocks are placed in the order of their path. One that could
not be read ends it there; what had landed behind stays below, and its tokens are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.moves import HBM, IN_HBM, IN_NVME, IN_RAM, NVME, RAM, Moves

if TYPE_CHECKING:
    from engine.core.request import Request
    from engine.core.spills import Spills
    from radix import Lease, Path, RadixTree
    from tiers import Landed

#: Copies under way for one restore: what may still be moved for a request that has gone (16,000 tokens).
WINDOW = 1024


@dataclass(slots=True, eq=False)
class Restore:
    """`blocks` of `path`, from its `first` on, into `slots` of HBM. `sources` is each one's lowest tier."""

    path: Path
    first: int
    blocks: list[int]
    slots: list[int]
    lease: Lease
    request: Request | None
    sources: list[str] = field(default_factory=list)
    ended: list[Landed | None] = field(default_factory=list)
    begun: int = 0
    landed: int = 0
    placed: int = 0
    stopped: bool = False  # no more copies are begun: one has failed, or nobody wants them

    def tokens(self, block_size: int) -> dict[str, int]:
        """Tokens that were placed, by the lowest tier that they came from."""
        return {tier: n * block_size for tier, n in Counter(self.sources[:self.placed]).items()}

    @property
    def is_over(self) -> bool:
        return self.landed == self.begun and (self.stopped or self.begun == len(self.blocks))


class Restores:
    """All restores and look-aheads of one core."""

    def __init__(self, tree: RadixTree, moves: Moves, spills: Spills) -> None:
        self._tree = tree
        self._moves = moves
        self._spills = spills
        self._hbm = moves.slots(HBM)
        self._ram = moves.slots(RAM) if moves.store.ram is not None else None
        self._active: dict[int, Restore] = {}   # by each block that is not placed yet
        self._ahead: dict[int, int] = {}        # blocks on their way to RAM -> requests that look ahead for them
        self._bad: list[tuple[str, int, int, str]] = []
        self._over: list[Restore] = []
        self.failed = 0

    # -- asking ------------------------------------------------------------------------------------------

    def pending(self, path: Path, reach: int) -> bool:
        """Whether something that continues this path is moving now: wait for it."""
        if self._active or self._ahead:
            run = path.known[path.n_blocks:reach].tolist()
            if run and (run[0] in self._active or not self._ahead.keys().isdisjoint(run)):
                return True
        return reach < len(path.known) and self._tree.leaving_slot(HBM, int(path.known[reach])) is not None

    def orphans(self) -> int:
        """Slots of HBM that come back when restores of requests that went away end."""
        return sum(len(r.blocks) - r.placed for r in set(self._active.values()) if r.request is None)

    def held(self) -> set[int]:
        """Slots of HBM that belong to restores: taken, and not the tree's yet."""
        return {s for r in set(self._active.values()) for s in r.slots[r.placed:]}

    # -- into HBM ----------------------------------------------------------------------------------------

    def start(self, request: Request, path: Path, reach: int, slots: list[int]) -> Restore:
        """Begin to fill `slots` with the blocks of `path` from its end in HBM to `reach`."""
        lease = self._tree.lease(path._replace(partial=None), f"restore for {request.id}", counted=None, reach=reach)
        self._tree.touch(path, reach=reach)
        blocks = path.known[path.n_blocks:reach].tolist()
        restore = Restore(path, path.n_blocks, blocks, slots, lease, request)
        self._active.update(dict.fromkeys(blocks, restore))
        self._go_on(restore)
        return restore

    def _go_on(self, restore: Restore) -> None:
        while restore.begun < len(restore.blocks) and restore.begun - restore.landed < WINDOW and not restore.stopped:
            n = restore.begun
            block = restore.blocks[n]
            bits = self._tree.where(block)
            if bits & IN_HBM:  # somebody computed it meanwhile
                restore.stopped = True
                break
            tier = RAM if bits & IN_RAM else NVME
            request = restore.request
            restore.sources.append(NVME if request is not None and block in request.looked_ahead else tier)
            restore.ended.append(None)
            restore.begun += 1
            name = self._moves.name(restore.path, restore.first + n) if tier == NVME else None
            self._moves.begin((tier, self._tree.slot(tier, block)), (HBM, restore.slots[n]),
                              lambda end, n=n: self._landed(restore, n, end), name)  # type: ignore[misc]
        if restore.is_over:
            self._end(restore)

    def _landed(self, restore: Restore, n: int, end: Landed) -> None:
        restore.ended[n] = end
        restore.landed += 1
        if end.failed is not None:
            restore.stopped = True
            self._note_failure(restore.blocks[n], end)
        self._place(restore)
        self._go_on(restore)

    def _place(self, restore: Restore) -> None:
        """What has landed without a gap is the tree's."""
        first = last = restore.placed
        while last < restore.begun and (end := restore.ended[last]) is not None and end.failed is None:
            if self._tree.where(restore.blocks[last]) & IN_HBM:
                restore.stopped = True
                break
            last += 1
        if last > first:
            blocks = restore.blocks[first:last]
            self._hbm.free(self._tree.placed(HBM, blocks, restore.slots[first:last]))
            restore.placed = last
            for block in blocks:
                del self._active[block]

    def _end(self, restore: Restore) -> None:
        """Nothing of it is moving any more."""
        for block in restore.blocks[restore.placed:]:
            self._active.pop(block, None)
        if restore.request is None:
            self._give_back(restore)
            restore.lease.release()
        else:
            self._over.append(restore)

    def _give_back(self, restore: Restore) -> None:
        """Slots that the tree did not take are empty again."""
        for n in range(restore.placed, len(restore.slots)):
            end = restore.ended[n] if n < restore.begun else None
            if end is not None and end.failed is None:
                self._hbm.free((restore.slots[n],))
            else:
                self._hbm.abort((restore.slots[n],))

    def over(self) -> list[Restore]:
        """Restores that have ended since the last call, and whose requests go on: `close` each."""
        over, self._over = self._over, []
        return over

    def close(self, restore: Restore) -> list[int]:
        """The request holds for itself what was placed; returns as many slots to compute into as were not."""
        restore.lease.release()
        n = len(restore.slots) - restore.placed
        if not n:
            return []
        self._give_back(restore)
        taken = self._hbm.take(n)
        assert taken is not None  # they were freed just now
        return taken

    def leave(self, restore: Restore) -> None:
        """The request goes away. What is under way lands in the tree; nothing more is begun."""
        restore.request = None
        restore.stopped = True
        if restore in self._over:
            self._over.remove(restore)
            self._end(restore)

    # -- into RAM, for who still waits ---------------------------------------------------------------------

    def look_ahead(self, request: Request, path: Path, reach: int) -> None:
        """Copy what lies on NVMe alone into RAM, as far as slots can be had for it without writing."""
        if self._ram is None or reach == path.n_blocks:
            return
        self._tree.touch(path, reach=reach)
        for i in range(path.n_blocks, reach):
            block = int(path.known[i])
            if self._tree.where(block) != IN_NVME or block in self._ahead:
                continue
            if len(self._ahead) >= self._ram.capacity // 2 or (slot := self._spills.take_ram_clean()) is None:
                return
            if not self._tree.where(block) & IN_NVME:  # room was made by forgetting it
                self._ram.abort((slot,))
                return
            request.looked_ahead.add(block)
            self._ahead[block] = slot
            self._moves.begin((NVME, self._tree.slot(NVME, block)), (RAM, slot),
                              self._in_ram(block, self._tree.born(block), request),
                              self._moves.name(path, i))

    def _in_ram(self, block: int, born: int, request: Request) -> Callable[[Landed], None]:
        def landed(end: Landed) -> None:
            self._ahead.pop(block, None)
            self._spills.land_in_ram(end, block, born)
            if end.failed is not None:
                request.looked_ahead.discard(block)
                self._note_failure(block, end, born)
        return landed

    # -- bad copies ----------------------------------------------------------------------------------------

    def _note_failure(self, block: int, end: Landed, born: int | None = None) -> None:
        self.failed += 1
        if end.bad:
            self._bad.append((end.source.tier, block, self._tree.born(block) if born is None else born,
                              end.failed or "bad"))

    def tend(self) -> None:
        """Drop the copies that turned out bad, once nobody holds their path."""
        kept = []
        for tier, block, born, reason in self._bad:
            if not self._tree.is_still(block, born) or not self._tree.where(block) & (
                    IN_RAM if tier == RAM else IN_NVME):
                continue
            if self._tree.is_leased(block):
                kept.append((tier, block, born, reason))
                continue
            slot = self._tree.slot(tier, block)
            self._tree.lost(tier, [block], "bad_record")
            self._moves.slots(tier).free((slot,))
        self._bad = kept
