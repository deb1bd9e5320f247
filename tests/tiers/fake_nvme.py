"""An nvme tier of records in a dict, whose faults are planned."""

from __future__ import annotations

from collections import deque

from tiers import BadRecordError, Place, RecordName, SlotAllocator, TieredStore
from tiers.fake_device import WorstCaseDevice


class FakeNvme:
    """What `TieredStore` needs of `Nvme`. `faults`: what the next calls raise (None: nothing)."""

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self.slots = SlotAllocator(capacity)
        self.records: dict[int, tuple[bytes, bytes]] = {}
        self.order: list[bytes] = []
        self.faults: deque[Exception | None] = deque()
        self.closed = False
        self._block_bytes = block_bytes

    def write(self, slot: int, name: RecordName, payload: memoryview) -> None:
        self._fault()
        self.records[slot] = name.digest, bytes(payload[:self._block_bytes])
        self.order.append(name.digest)

    def read(self, slot: int, name: RecordName, into: memoryview) -> None:
        self._fault()
        digest, payload = self.records.get(slot, (b"", b""))
        if digest != name.digest:
            raise BadRecordError("digest", f"slot {slot} holds another record")
        into[:len(payload)] = payload

    def close(self) -> None:
        self.closed = True

    def _fault(self) -> None:
        if self.faults and (error := self.faults.popleft()) is not None:
            raise error


def name_of(key: int) -> RecordName:
    digest = key.to_bytes(16, "little")
    return RecordName(b"root".ljust(16, b"\0"), digest, b"root".ljust(16, b"\0"), 0, b"\0" * 64)


def held(store: TieredStore, device: WorstCaseDevice, nvme: FakeNvme, place: Place) -> bytes:
    """The bytes of a block where it lies."""
    if place.tier == "hbm":
        return bytes(device.pool[place.slot])
    if place.tier == "ram":
        assert store.ram is not None
        return bytes(store.ram.view(place.slot))
    return nvme.records[place.slot][1]
