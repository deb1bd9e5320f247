"""Durability: ready blocks of open paths are written to NVMe, so that a restart finds them.

A path is open while it was requested within `session_idle`; one that was used twice stays in line for longer.
Parents go first, and become ready first, so NVMe is prefix-closed. A write is one batch of neighbours on one path,
and a lease holds the path until the batch has landed. All writes, those that make room too (`urgent`), share
one budget of bytes: flash wears.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.core.moves import HBM, IN_NVME, IN_RAM, NVME, RAM, Moves

if TYPE_CHECKING:
    from radix import Lease, Path, RadixTree
    from tiers import Landed

log = logging.getLogger("trunkline.core")

#: Blocks of one batch, and batches under way: what a lease holds back for how long, and what is queued at most.
BATCH = 64
MOST_BATCHES = 4
#: Paths in line. More than ever run at once; what falls out is counted.
MOST_PATHS = 4096
#: Seconds until writing is tried again on a disk that is full or fails.
RETRY_S = 30.0
#: Uses that keep a path in line when its session has gone idle.
USED_TWICE = 2


@dataclass(slots=True)
class Line:
    """A path in line: its last block (by id and birth), since when it waits, when it was last requested. `whole`: it
    is written for its last block's sake, and not at all where there is no room for all of it."""

    path: Path
    end: int
    born: int
    since: float
    requested: float
    whole: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of one path on their way down, parents first; `ended` says how each landed (None: not yet)."""

    blocks: list[int]
    parents: list[int]
    slots: list[int]
    lease: Lease | None
    ended: list[Landed | None] = field(default_factory=list)
    placed: int = 0


class Persist:
    """See the module. `landed(block)` is called when a block is on NVMe, or will not get there now."""

    def __init__(self, tree: RadixTree, moves: Moves, clock: Callable[[], float], *, within: float,
                 session_idle: float, write_limit: int | None, block_bytes: int) -> None:
        self._tree = tree
        self._moves = moves
        self._clock = clock
        self._delay = within / 2
        self._idle = session_idle
        self._limit = write_limit
        self._block_bytes = block_bytes
        self.landed: Callable[[int], None] = lambda block: None
        self._slots = moves.slots(NVME)
        self._line: OrderedDict[str, Line] = OrderedDict()
        self._batches: set[Batch] = set()
        self._flying: set[int] = set()
        self._budget, self._filled_at = float(max(write_limit or 0, block_bytes)), clock()
        self._paused_until = float("-inf")
        self._full = False       # the last failure was for want of space, and room was made for a second try
        self.written = self.failed = self.skipped = self.expired = 0

    # -- in line -----------------------------------------------------------------------------------------

    def note(self, owner: str, path: Path) -> None:
        """The path has blocks that may not be on NVMe yet; its owner requests it now."""
        end, now = path.end, self._clock()
        line = self._line.get(owner)
        if line is not None:
            line.path, line.end, line.born, line.requested = path, end, path.born, now
            return
        self._line[owner] = Line(path, end, path.born, now, now)
        self._shorten()

    def _shorten(self) -> None:
        """Of more than are allowed, the one that has waited longest falls out; who makes room stays."""
        if len(self._line) > MOST_PATHS:
            self.skipped += 1
            self._out_of_line(next((o for o, line in self._line.items() if not line.whole), next(iter(self._line))))

    def urgent(self, block: int) -> None:
        """A block that leaves the tier above: it is written as soon as can be, its parents first. Nothing while nothing
        can be written: a disk that is full for long would have them pile up."""
        name = f"block {block}"
        if block in self._flying or name in self._line or not self.can_write():
            return
        path = self._tree.path_to(block)
        self._line[name] = Line(path, block, self._tree.born(block), float("-inf"), self._clock(), whole=True)
        self._line.move_to_end(name, last=False)
        self._shorten()

    def can_write(self) -> bool:
        """Whether writing goes on at all, and the budget has something left."""
        self._refill()
        return not self.is_paused() and (self._limit is None or self._budget >= self._block_bytes)

    def is_paused(self) -> bool:
        """Whether the disk was full, or failed, a moment ago."""
        return self._clock() < self._paused_until

    def flies(self, block: int) -> bool:
        return block in self._flying

    def next_due(self) -> float | None:
        """Seconds until something is to be written; None where nothing is in line."""
        if not self._line:
            return None
        first = min(line.since for line in self._line.values()) + self._delay
        return max(first - self._clock(), self._paused_until - self._clock(), 0.05)

    def idle(self) -> bool:
        return not self._line and not self._batches

    def waiting(self) -> int:
        """Paths in line."""
        return len(self._line)

    def batches(self) -> int:
        """Batches under way; each holds a lease."""
        return len(self._batches)

    # -- writing -----------------------------------------------------------------------------------------

    def tend(self, *, force: bool = False) -> None:
        """Begin the writes that are due (with `force`, all)."""
        if not self._line or len(self._batches) >= MOST_BATCHES:
            return
        now = self._clock()
        for owner, line in list(self._line.items()):
            if len(self._batches) >= MOST_BATCHES or not self.can_write():
                return
            if force or now - line.since >= self._delay:
                self._write(owner, line)

    def _write(self, owner: str, line: Line) -> None:
        """One batch of the line's path; it goes out of line once nothing of it is missing."""
        path = line.path
        if not self._tree.is_still(line.end, line.born):
            return self._out_of_line(owner)
        bits = self._tree.residence(path)
        reach = self._reach(path, bits)
        missing: list[int] = np.flatnonzero((bits[:reach] & IN_NVME) == 0).tolist()
        if not missing or self._is_over(line, int(path.known[missing[-1]])):
            self.expired += bool(missing)
            return self._out_of_line(owner)
        wanted = [i for i in missing if int(path.known[i]) not in self._flying][:self._affordable()]
        if not wanted:
            return None
        # Before room is made: else what is evicted may be the path's own head, and what is written is in vain.
        lease = self._hold(path, wanted, bits)
        slots = self._room(len(wanted)) if self._fits(len(missing), line) else []
        if slots:
            return self._begin(path, wanted[:len(slots)], slots, bits, lease)
        if lease is not None:
            lease.release()
        self.skipped += len(wanted)
        return self._out_of_line(owner)

    def _out_of_line(self, owner: str) -> None:
        self.landed(self._line.pop(owner).end)

    def _reach(self, path: Path, bits: np.ndarray) -> int:
        """Blocks from the head that are somewhere, those that are leaving HBM too."""
        holes = np.flatnonzero(bits == 0)
        reach = int(holes[0]) if len(holes) else len(bits)
        while reach < len(bits) and self._tree.leaving_slot(HBM, int(path.known[reach])) is not None:
            reach += 1
        return reach

    def _is_over(self, line: Line, last: int) -> bool:
        return self._clock() - line.requested > self._idle and self._tree.uses(last) < USED_TWICE

    def _affordable(self) -> int:
        return BATCH if self._limit is None else min(BATCH, int(self._budget // self._block_bytes))

    def _refill(self) -> None:
        if self._limit is not None:
            now = self._clock()
            most = float(max(self._limit, self._block_bytes))
            self._budget = min(most, self._budget + (now - self._filled_at) * self._limit)
            self._filled_at = now

    def _room(self, n: int) -> list[int]:
        """Up to n slots of NVMe, evicting what the tree lets go."""
        self._evict(n - self._slots.free_count)
        return self._slots.take(min(n, self._slots.free_count)) or []

    def _fits(self, missing: int, line: Line) -> bool:
        """Whether a block that leaves the tier above gets its whole path in, in place of what is worth less. Else two
        that do not fit together would push each other out for ever."""
        evicted = missing - self._slots.free_count
        if not line.whole or evicted <= 0:
            return True
        if evicted > self._tree.evictable(NVME):
            return False
        value = self._tree.value(line.end)
        return all(self._tree.value(v.block) < value
                   for n in (1, min(evicted, BATCH)) for v in self._tree.coming(NVME, n))

    def _evict(self, n: int) -> None:
        if n > 0:
            victims = self._tree.victims(NVME, n)
            self._slots.free([v.slot for v in victims])
            self._tree.dropped(NVME, [v.block for v in victims], reason="space")

    def _hold(self, path: Path, wanted: list[int], bits: np.ndarray) -> Lease | None:
        """Holds the path up to the last block that is written; who is leaving HBM needs no lease: its slot waits."""
        here = [i for i in wanted if bits[i]]
        reach = here[-1] + 1 if here else wanted[0]
        if not reach:
            return None
        held = self._tree.path_to(int(path.known[reach - 1]))
        return self._tree.lease(held, "persist", counted=None, reach=reach)

    def _begin(self, path: Path, wanted: list[int], slots: list[int], bits: np.ndarray, lease: Lease | None) -> None:
        blocks = [int(path.known[i]) for i in wanted]
        parents = [int(path.known[i - 1]) if i else -1 for i in wanted]
        batch = Batch(blocks, parents, slots, lease, [None] * len(blocks))
        self._batches.add(batch)
        self._flying.update(blocks)
        self._budget -= self._block_bytes * len(blocks)
        for n, i in enumerate(wanted):
            self._moves.begin(self._source(blocks[n], int(bits[i])), (NVME, slots[n]),
                              lambda end, n=n: self._ended(batch, n, end),  # type: ignore[misc]
                              self._moves.name(path, i))

    def _source(self, block: int, bits: int) -> tuple[str, int]:
        if bits & IN_RAM:
            return RAM, self._tree.slot(RAM, block)
        leaving = self._tree.leaving_slot(HBM, block) if not bits else None
        return HBM, self._tree.slot(HBM, block) if leaving is None else leaving

    # -- landing -----------------------------------------------------------------------------------------

    def _ended(self, batch: Batch, n: int, end: Landed) -> None:
        batch.ended[n] = end
        while batch.placed < len(batch.blocks) and (landed := batch.ended[batch.placed]) is not None:
            self._place(batch, batch.placed, landed)
            batch.placed += 1
        if batch.placed == len(batch.blocks):
            if batch.lease is not None:
                batch.lease.release()
            self._batches.discard(batch)

    def _place(self, batch: Batch, n: int, end: Landed) -> None:
        """Ready once its parent is: in the order of the path."""
        block, slot = batch.blocks[n], batch.slots[n]
        self._flying.discard(block)
        parent = batch.parents[n]
        if end.failed is not None:
            self._slots.abort((slot,))
            self._note_failure(end)
        elif self._tree.where(block) & IN_NVME or (parent >= 0 and not self._tree.where(parent) & IN_NVME):
            self._slots.free((slot,))
        else:
            self._tree.placed(NVME, [block], [slot])
            self.written += 1
            self._full = False
        self.landed(block)

    def _note_failure(self, end: Landed) -> None:
        """A full disk: make room among our own slots and try once more. Then, or for another reason, pause."""
        self.failed += 1
        if self.is_paused():
            return
        if end.no_space and not self._full:
            self._full = True
            self._evict(BATCH)
        else:
            self._paused_until = self._clock() + RETRY_S
            self._full = False
            log.warning("writing to NVMe failed (%s); reading goes on, and writing is tried again in %.0f s",
                        end.failed, RETRY_S)
