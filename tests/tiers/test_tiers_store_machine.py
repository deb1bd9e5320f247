"""The store against a model: blocks by place, moves under way. Devices in the worst order, workers in any."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from fake_nvme import FakeNvme, held, name_of
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_tiers_fence import NoRestoreFence, NoSpillFence

from tiers import (
    BadRecordError,
    DeviceCopies,
    HostMemory,
    NoSpaceError,
    Place,
    SlotAllocator,
    SlotState,
    TieredStore,
    Wake,
)
from tiers.fake_device import SteppedWorker, WorstCaseDevice

BLOCK = 32
TIERS = ("hbm", "ram", "nvme")
SIZES = {"hbm": 4, "ram": 3, "nvme": 5}


def payload(key: int) -> bytes:
    return key.to_bytes(8, "little") * (BLOCK // 8)


class StoreMachine(RuleBasedStateMachine):
    """`ready`: which block each READY slot holds. `moving`: moves under way, by key, with both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[Place, int] = {}
        self.moving: dict[int, tuple[int, Place, Place]] = {}
        self.done: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.writes: list[bytes] = []
        self.keys = self.moves = 0
        self.wrong_reads: list[str] = []

    @initialize(order=st.sampled_from(["early", "late", "any"]), seed=st.integers(0, 1000), staging=st.integers(1, 4))
    def begin(self, order: str, seed: int, staging: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.wake = Wake()
        chosen: Any = self.rng if order == "any" else order
        self.device = WorstCaseDevice(SIZES["hbm"], BLOCK, chosen, self.wake)
        self.reader, self.writer = SteppedWorker(self.wake), SteppedWorker(self.wake)
        self.nvme = FakeNvme(SIZES["nvme"], BLOCK)
        self.store = TieredStore(
            self.device, SlotAllocator(SIZES["hbm"]), HostMemory(SIZES["ram"], BLOCK), HostMemory(staging, BLOCK),
            self.nvme, self.reader, self.writer, self.wake, BLOCK, lambda: self.now)  # type: ignore[arg-type]
        self.store._copies = self.copies(self.device)

    #: What fences the device's copies.
    copies = DeviceCopies
    #: Whether things go wrong.
    faults = True

    def pick(self, places: list[Place]) -> Place:
        return self.rng.choice(sorted(places))

    # -- what an engine does -----------------------------------------------------------------------------

    @rule()
    def compute_a_block(self) -> None:
        """Launched, and READY at once: that it has not run is nobody's business but the fences'."""
        taken = self.store.hbm.take(1)
        if taken is None:
            return
        self.keys += 1
        key, slot = self.keys, taken[0]

        def write(pool: Any) -> None:
            pool[slot] = bytearray(payload(key))

        self.device.launch(write)
        self.store.hbm.ready([slot])
        self.ready[Place("hbm", slot)] = key

    @precondition(lambda self: any(p.tier == "hbm" for p in self.ready))
    @rule(free=st.booleans())
    def read_a_block(self, free: bool) -> None:
        """A computation that reads it is launched; its request may end before that has run."""
        place = self.pick([p for p in self.ready if p.tier == "hbm"])
        key = self.ready[place]

        def read(pool: Any) -> None:
            if bytes(pool[place.slot]) != payload(key):
                self.wrong_reads.append(f"block {key} was read from {place}, which held something else")

        self.device.launch(read)
        if free:
            self.forget(place)

    @precondition(lambda self: {p.tier for p in self.ready} > {"hbm"})
    @rule()
    def a_restore_takes_its_place(self) -> None:
        """One request ends, and another's blocks go where its were."""
        self.read_a_block(free=True)
        self.move("hbm")

    @precondition(lambda self: bool(self.ready))
    @rule(to=st.sampled_from(TIERS))
    def move(self, to: str) -> None:
        sources = [p for p in self.ready if p.tier != to]
        taken = self.store.slots(to).take(1) if sources else None
        if taken is None:
            return
        source, there = self.pick(sources), Place(to, taken[0])
        assert there not in self.ready
        for _, one, other in self.moving.values():
            assert there not in (one, other), f"{there} was handed out while a copy refers to it"
        key = self.ready[source]
        self.moves += 1
        self.moving[self.moves] = key, source, there
        if to == "nvme":
            self.writes.append(name_of(key).digest)
        self.store.begin(self.moves, source, there, name_of(key))

    @precondition(lambda self: bool(self.ready))
    @rule()
    def free(self) -> None:
        self.forget(self.pick(list(self.ready)))

    def forget(self, place: Place) -> None:
        del self.ready[place]
        self.store.slots(place.tier).free([place.slot])

    # -- what happens by itself --------------------------------------------------------------------------

    @rule(reads=st.integers(0, 2), writes=st.integers(0, 2))
    def work(self, reads: int, writes: int) -> None:
        self.now += 0.1
        for worker, n in ((self.reader, reads), (self.writer, writes)):
            for _ in range(n):
                worker.step(self.rng.randint(0, 1) if worker is self.reader else 0) or worker.step()

    @rule()
    def compute(self) -> None:
        self.device.sync()

    @rule()
    def poll(self) -> None:
        for end in self.store.poll():
            key, source, there = self.moving.pop(end.key)
            assert (end.source, end.target) == (source, there)
            way = f"{source.tier}>{there.tier}"
            slots = self.store.slots(there.tier)
            if end.failed is None:
                assert slots.state(there.slot) is SlotState.READY
                self.ready[there] = key
                self.done[way] = self.done.get(way, 0) + 1
                continue
            self.failed[way] = self.failed.get(way, 0) + 1
            assert slots.state(there.slot) is SlotState.FILLING
            slots.abort([there.slot])
            if end.bad and source in self.ready:
                self.forget(source)

    # -- faults ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.faults)
    @rule(error=st.sampled_from([OSError(5, "Input/output error"), NoSpaceError(28, "No space left"),
                                 BadRecordError("checksum", "it is torn"), RuntimeError("a bug")]))
    def the_next_file_call_fails(self, error: Exception) -> None:
        self.nvme.faults.append(error)

    @precondition(lambda self: self.faults)
    @rule()
    def the_next_copy_fails(self) -> None:
        fails = iter(["the copy failed"])
        self.device.fails = lambda: next(fails, None)

    @precondition(lambda self: self.faults and self.moves > 5)
    @rule(who=st.sampled_from(["device", "reader", "writer"]))
    def one_dies(self, who: str) -> None:
        if self.rng.random() < 0.2:
            getattr(self, who).die()

    # -- what holds --------------------------------------------------------------------------------------

    @invariant()
    def what_is_pending_is_what_was_begun(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.pending() == len(self.moving)
        assert sum(way["in_flight"] for way in self.store.stats().values()) == len(self.moving)
        assert not self.wrong_reads, self.wrong_reads
        for way, counted in self.store.stats().items():
            assert counted["blocks"] == self.done.get(way, 0)
            assert counted["bytes"] == BLOCK * counted["blocks"]
            assert counted["failed"] == self.failed.get(way, 0)
        for tier in TIERS:
            slots = self.store.slots(tier)
            assert {p.slot for p in self.ready if p.tier == tier} == slots.ready_slots()
        self.what_is_ready_holds_its_block()

    def what_is_ready_holds_its_block(self, *tiers: str) -> None:
        """In HBM only once all that was launched has run."""
        for place, key in self.ready.items():
            if place.tier in (tiers or ("ram", "nvme")):
                assert self.held(place) == payload(key), f"block {key} at {place} is garbled"

    @precondition(lambda self: self.faults and self.moves > 10)
    @rule()
    def close(self) -> None:
        """While moves are pending, at times: what has not landed is told afterwards."""
        if self.rng.random() < 0.1:
            self.store.close()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for _ in range(200):
            self.work(1, 1)
            self.poll()
        self.device.sync()
        assert self.store.pending() == 0
        self.what_is_pending_is_what_was_begun()
        self.what_is_ready_holds_its_block(*TIERS)
        begun = iter(self.writes)
        assert all(digest in begun for digest in self.nvme.order), "written in another order than begun"
        for place in list(self.ready):
            self.forget(place)
        assert self.store.staging is not None
        for slots in (*map(self.store.slots, TIERS), self.store.staging.slots):
            assert slots.used_count == 0  # no hold was left behind: nothing drains

    def held(self, place: Place) -> bytes:
        return held(self.store, self.device, self.nvme, place)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("broken", [NoSpillFence, NoRestoreFence])
def test_the_machine_finds_a_fence_that_is_missing(broken: type[DeviceCopies]) -> None:
    """PITFALLS 26."""
    machine = type("Broken", (StoreMachine,), {"copies": broken, "faults": False})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(  # type: ignore[no-untyped-call]
            max_examples=3000, stateful_step_count=50, deadline=None, database=None, phases=[Phase.generate],
            report_multiple_bugs=False))
