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
from tiers.slots import SlotAllocator
from tiers.tier import HBM, NVME, RAM, Landed, Place
from tiers.worker import Wake, Worker

#: Weight of the newest move in the running average of speed.
NEWEST = 0.1
WAYS = ((HBM, RAM), (RAM, HBM), (HBM, NVME), (NVME, HBM), (NVME, RAM), (RAM, NVME))


@dataclass(slots=True)
class _Way:
    """Counters of one direction, driven by the copies."""

    blocks: int = 0
    failed: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    speed: float | None = None
    last_end: float = float("-inf")


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
    _tickets: dict[int, _Move] = field(default_factory=dict)
    _pending: int = 0
    _ways: dict[tuple[str, str], _Way] = field(default_factory=lambda: {w: _Way() for w in WAYS})
    _up: deque[_Move] = field(default_factory=deque)       # nvme > hbm that wait for staging
    _down: deque[_Move] = field(default_factory=deque)     # hbm > nvme that wait for staging
    _writes: deque[_Move] = field(default_factory=deque)   # begun and not submitted, in order
    _landed: list[Landed] = field(default_factory=list)

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
        """Move one block. `source` is READY, `target` FILLING; `name`: what a record is to be, or must be."""
        self.slots(source.tier).hold(source.slot)
        move = _Move(key, source, target, name, self.clock())
        self._pending += 1
        self._ways[source.tier, target.tier].in_flight += 1
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
        self._tickets[self._copies.out(move.source.slot, into)] = move

    def _into(self, move: _Move, source: memoryview) -> None:
        self._tickets[self._copies.into(move.target.slot, source)] = move

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
        while self._up and (taken := slots.take(1)) is not None:
            move = self._up.popleft()
            move.staged = taken[0]
            self._read(move, self.staging.padded(move.staged))
        while self._down and slots.free_count > slots.capacity // 4 and (taken := slots.take(1)) is not None:
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
        self._pending -= 1
        self._count(move, failed)
        if failed is None:
            self.slots(move.target.tier).ready((move.target.slot,))
        self.slots(move.source.tier).unhold(move.source.slot)
        self._landed.append(Landed(move.key, move.source, move.target, failed, bad, no_space))

    def _count(self, move: _Move, failed: str | None) -> None:
        """Busy seconds: of moves that overlap, each counts from the end of the one before."""
        way, now = self._ways[move.source.tier, move.target.tier], self.clock()
        took = now - max(move.began, way.last_end)
        way.last_end = now
        way.in_flight -= 1
        way.seconds += took
        if failed is not None:
            way.failed += 1
            return
        way.blocks += 1
        if took > 0:
            speed = self.block_bytes / took
            way.speed = speed if way.speed is None else way.speed + NEWEST * (speed - way.speed)

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
                             "seconds": round(way.seconds, 3), "in_flight": way.in_flight}
                for (a, b), way in self._ways.items() if {a, b} <= there}

    def workers(self) -> dict[str, bool]:
        """Which of the threads are alive."""
        return {"device": self.device.alive, "reader": self.reader.alive, "writer": self.writer.alive}

    def close(self) -> None:
        """End the workers after what they have begun, and let the folder go."""
        self.device.close()
        self.reader.close()
        self.writer.close()
        if self.nvme is not None:
            self.nvme.close()
