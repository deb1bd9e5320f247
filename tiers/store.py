"""The tiered store: moves of single blocks between places, what is under way, and how each ended.

    hbm ⇄ ram       the device's copies
    ram ⇄ nvme      the writer, the readers
    hbm ⇄ nvme      both, one after the other, through a staging slot

A pending move holds both ends: the source slot is held for reading, the target is FILLING. The store chooses nothing
and knows no tokens; who begins a move has taken its target slot, and is told once how it ended.

Restores go first in staging, and a quarter of it is kept for them. Writes to nvme are submitted in the order in which
they were begun, so a child is never written before its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tiers.errors import BadRecordError, NoSpaceError
from tiers.fence import Device, DeviceCopies
from tiers.nvme import Nvme
from tiers.ram import HostMemory
from tiers.record import RecordName
from tiers.slots import SlotAllocator, SlotState
from tiers.tier import HBM, NVME, RAM, Landed, Place
from tiers.worker import Wake, Worker

#: Weight of the newest move in the running average of speed.
NEWEST = 0.1
WAYS = ((HBM, RAM), (RAM, HBM), (HBM, NVME), (NVME, HBM), (NVME, RAM), (RAM, NVME))


@dataclass(slots=True)
class _Way:
    """Counters of one direction, driven by the copies. `landed`: since the last look at the clock, of moves of which
    the first began at `first`; `ended` is that look."""

    blocks: int = 0
    failed: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    speed: float | None = None
    landed: int = 0
    first: float = float("inf")
    ended: float = float("-inf")


@dataclass(slots=True, eq=False)
class _Move:
    key: int
    source: Place
    target: Place
    name: RecordName | None
    began: float
    staged: int = -1       # staging slot
    ready: bool = False    # a write whose bytes are in host memory


@dataclass(slots=True)
class TieredStore:
    """See the module. `staging` is needed for moves between HBM and nvme, `ram` and `nvme` where the tiers exist."""

    device: Device
    hbm: SlotAllocator
    ram: HostMemory | None
    staging: HostMemory | None
    nvme: Nvme | None
    reader: Worker
    writer: Worker
    wake: Wake
    block_bytes: int
    clock: Callable[[], float]
    _copies: DeviceCopies = field(init=False)
    _tickets: dict[int, _Move] = field(init=False, default_factory=dict)
    _pending: int = field(init=False, default=0)
    _ways: dict[tuple[str, str], _Way] = field(init=False, default_factory=lambda: {w: _Way() for w in WAYS})
    _up: deque[_Move] = field(init=False, default_factory=deque)       # nvme > hbm that wait for staging
    _down: deque[_Move] = field(init=False, default_factory=deque)     # hbm > nvme that wait for staging
    _writes: deque[_Move] = field(init=False, default_factory=deque)   # begun and not submitted, in order
    _landed: list[Landed] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._copies = DeviceCopies(self.device)

    def slots(self, tier: str) -> SlotAllocator:
        if tier == HBM:
            return self.hbm
        memory = self.ram if tier == RAM else self.nvme
        assert memory is not None, f"there is no tier {tier!r}"
        return memory.slots

    # -- beginning ---------------------------------------------------------------------------------------

    def begin(self, key: int, source: Place, target: Place, name: RecordName | None = None) -> None:
        """Move one block. `source` is READY, `target` FILLING (else SlotError, and nothing has begun); `name`: what a
        record is to be, or must be."""
        way = self._ways[source.tier, target.tier]
        assert name is not None or NVME not in (source.tier, target.tier), "a record has a name"
        self.slots(target.tier).expect(target.slot, SlotState.FILLING)
        self.slots(source.tier).hold(source.slot)
        move = _Move(key, source, target, name, self.clock())
        self._pending += 1
        way.in_flight += 1
        match source.tier, target.tier:
            case "hbm", "ram":
                self._out(move, self._ram().view(target.slot))
            case "ram", "hbm":
                self._into(move, self._ram().view(source.slot))
            case "ram", "nvme":
                move.ready = True
                self._writes.append(move)
                self._submit_writes()
            case "hbm", "nvme":
                self._writes.append(move)
                self._down.append(move)
                self._stage()
            case "nvme", "ram":
                self._read(move, self._ram().padded(target.slot))
            case _:
                self._up.append(move)
                self._stage()

    def _ram(self) -> HostMemory:
        assert self.ram is not None, "there is no tier 'ram'"
        return self.ram

    def _out(self, move: _Move, into: memoryview) -> None:
        self._copy(move, partial(self._copies.out, move.source.slot, into))

    def _into(self, move: _Move, source: memoryview) -> None:
        self._copy(move, partial(self._copies.into, move.target.slot, source))

    def _copy(self, move: _Move, begin: Callable[[], int]) -> None:
        try:
            self._tickets[begin()] = move
        except Exception as error:  # a device that refuses fails this move, not the loop
            self._copied(move, str(error) or type(error).__name__)
            self.wake.set()
        if not self.device.alive:
            self.wake.set()  # it will not say itself that this has failed

    def _read(self, move: _Move, into: memoryview) -> None:
        nvme, slot, name = self.nvme, move.source.slot, move.name
        assert nvme is not None
        assert name is not None
        self.reader.submit(lambda: nvme.read(slot, name, into), move)

    def _stage(self) -> None:
        """Give staging slots to who waits for one: restores first."""
        if self.staging is None:
            assert not self._up, "no staging was given"
            assert not self._down, "no staging was given"
            return
        slots = self.staging.slots
        kept = min(-(-slots.capacity // 4), slots.capacity - 1)
        while self._up and (taken := slots.take(1)) is not None:
            move = self._up.popleft()
            move.staged = taken[0]
            self._read(move, self.staging.padded(move.staged))
        while self._down and slots.free_count > kept and (taken := slots.take(1)) is not None:
            move = self._down.popleft()
            move.staged = taken[0]
            self._out(move, self.staging.view(move.staged))

    def _submit_writes(self) -> None:
        nvme = self.nvme
        assert nvme is not None
        while self._writes and self._writes[0].ready:
            move = self._writes.popleft()
            memory, at = (self.ram, move.source.slot) if move.staged < 0 else (self.staging, move.staged)
            assert memory is not None
            assert move.name is not None
            self.writer.submit(partial(nvme.write, move.target.slot, move.name, memory.padded(at)), move)

    # -- ending ------------------------------------------------------------------------------------------

    def poll(self) -> list[Landed]:
        """Moves that ended since the last call; second halves of others begin. Never blocks."""
        self.wake.clear()
        if not self._pending:
            return []
        for ticket, failed in self._copies.finished():
            self._copied(self._tickets.pop(ticket), failed)
        for worker in (self.reader, self.writer):
            for move, value in worker.results():
                self._moved(move, value)
        self._stage()
        landed, self._landed = self._landed, []
        if landed:
            self._pending -= len(landed)
            self._look_at_the_clock()
        return landed

    def _copied(self, move: _Move, failed: str | None) -> None:
        """The device's half is done."""
        if failed is None and move.target.tier == NVME:
            move.ready = True
            self._submit_writes()
            return
        if move.target.tier == NVME:
            self._writes.remove(move)
            self._submit_writes()
        self._end(move, failed)

    def _moved(self, move: _Move, value: Any) -> None:
        """The disk's half is done."""
        if isinstance(value, Exception):
            self._end(move, str(value) or type(value).__name__, bad=isinstance(value, BadRecordError),
                      no_space=isinstance(value, NoSpaceError))
        elif move.target.tier == HBM:
            assert self.staging is not None
            self._into(move, self.staging.view(move.staged))
        else:
            self._end(move, None)

    def _end(self, move: _Move, failed: str | None, *, bad: bool = False, no_space: bool = False) -> None:
        if move.staged >= 0:
            assert self.staging is not None
            self.staging.slots.abort((move.staged,))
        way = self._ways[move.source.tier, move.target.tier]
        way.in_flight -= 1
        way.first = min(way.first, move.began)
        if failed is None:
            way.blocks += 1
            way.landed += 1
            self.slots(move.target.tier).ready((move.target.slot,))
        else:
            way.failed += 1
        self.slots(move.source.tier).unhold(move.source.slot)
        self._landed.append(Landed(move.key, move.source, move.target, failed, bad, no_space))

    def _look_at_the_clock(self) -> None:
        """Busy seconds of each direction, and its speed. Moves are found to have landed many at a time (a step is long,
        a copy short), so they are timed together: from the end of those before, where they waited for that."""
        now = self.clock()
        for way in self._ways.values():
            if way.first > now:
                continue  # none ended
            took = now - max(way.first, way.ended)
            way.seconds += took
            if took > 0 and way.landed:
                speed = way.landed * self.block_bytes / took
                way.speed = speed if way.speed is None else way.speed + NEWEST * (speed - way.speed)
            way.landed, way.first, way.ended = 0, float("inf"), now

    # -- what it tells -----------------------------------------------------------------------------------

    def pending(self) -> int:
        """Moves that have not landed."""
        return self._pending

    def queued_bytes(self, source: str, target: str) -> int:
        return self._ways[source, target].in_flight * self.block_bytes

    def speed(self, source: str, target: str) -> float | None:
        """Bytes a second, a running average; None before the first move."""
        return self._ways[source, target].speed

    def stats(self) -> dict[str, Any]:
        """By direction, of tiers that there are."""
        there = {HBM, *((RAM,) if self.ram else ()), *((NVME,) if self.nvme else ())}
        return {f"{a}>{b}": {"blocks": way.blocks, "bytes": way.blocks * self.block_bytes, "failed": way.failed,
                             "seconds": round(way.seconds, 3), "bytes_per_s": way.speed and round(way.speed),
                             "in_flight": way.in_flight}
                for (a, b), way in self._ways.items() if {a, b} <= there}

    def workers(self) -> dict[str, bool]:
        """Which of those that copy are alive."""
        return {"device": self.device.alive, "reader": self.reader.alive, "writer": self.writer.alive}

    def close(self) -> None:
        """End who copies, after what they have begun, and let the folder go. What has not landed then is told by
        `poll`, done or failed; nothing new is begun."""
        self.reader.close()
        self.device.close()
        self.writer.close()
        if self.nvme is not None:
            self.nvme.close()
