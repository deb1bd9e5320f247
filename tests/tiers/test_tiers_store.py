"""Moves of blocks: each kind, each failure, and what goes first."""

from __future__ import annotations

import random
import select
from typing import Any

import pytest
from fake_nvme import FakeNvme, held, name_of

from tiers import (
    BadRecordError,
    HostMemory,
    Landed,
    NoSpaceError,
    Place,
    SlotAllocator,
    SlotError,
    SlotState,
    ThreadWorker,
    TieredStore,
    Wake,
)
from tiers.fake_device import SteppedWorker, WorstCaseDevice

BLOCK = 64
WAYS = [("hbm", "ram"), ("ram", "hbm"), ("hbm", "nvme"), ("nvme", "hbm"), ("nvme", "ram"), ("ram", "nvme")]


def payload(key: int) -> bytes:
    return key.to_bytes(8, "little") * (BLOCK // 8)


class Bench:
    """A store with all tiers, and its parts."""

    def __init__(self, order: Any = "late", *, hbm: int = 4, ram: int = 4, staging: int = 4, nvme: int = 8) -> None:
        self.now = 0.0
        self.wake = Wake()
        self.device = WorstCaseDevice(hbm, BLOCK, order, self.wake)
        self.reader, self.writer = SteppedWorker(self.wake), SteppedWorker(self.wake)
        self.nvme = FakeNvme(nvme, BLOCK)
        self.store = TieredStore(
            self.device, SlotAllocator(hbm), HostMemory(ram, BLOCK), HostMemory(staging, BLOCK),
            self.nvme, self.reader, self.writer, self.wake, BLOCK, lambda: self.now)  # type: ignore[arg-type]

    def put(self, tier: str, key: int) -> Place:
        """A READY slot that holds the block."""
        (slot,) = self.store.slots(tier).take(1) or [-1]
        if tier == "hbm":
            self.device.pool[slot] = bytearray(payload(key))
        elif tier == "ram":
            assert self.store.ram is not None
            self.store.ram.view(slot)[:] = payload(key)
        else:
            self.nvme.records[slot] = name_of(key).digest, payload(key)
        self.store.slots(tier).ready([slot])
        return Place(tier, slot)

    def held(self, place: Place) -> bytes:
        return held(self.store, self.device, self.nvme, place)

    def begin(self, key: int, source: Place, tier: str) -> Place:
        (slot,) = self.store.slots(tier).take(1) or [-1]
        assert slot >= 0
        self.store.begin(key, source, Place(tier, slot), name_of(key))
        return Place(tier, slot)

    def run(self) -> list[Landed]:
        """Until nothing is pending."""
        landed: list[Landed] = []
        for _ in range(1000):
            self.now += 0.5
            self.reader.step()
            self.writer.step()
            landed += self.store.poll()
            if not self.store.pending():
                return landed
        raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("order", ["early", "late"])
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_block_is_the_same_at_the_other_end(source: str, target: str, order: str) -> None:
    bench = Bench(order)
    place = bench.put(source, 7)
    there = bench.begin(7, place, target)
    assert bench.store.pending() == 1
    assert bench.run() == [Landed(7, place, there)]
    assert bench.held(there) == payload(7)
    assert bench.store.slots(target).state(there.slot) is SlotState.READY
    assert bench.store.slots(source).state(place.slot) is SlotState.READY


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_counters_are_what_was_moved(source: str, target: str) -> None:
    """PITFALLS 14: move k, read k."""
    bench = Bench()
    places = [bench.put(source, key) for key in range(3)]
    for key, place in enumerate(places):
        bench.begin(key, place, target)
    assert bench.store.stats()[f"{source}>{target}"]["in_flight"] == 3
    assert bench.store.queued_bytes(source, target) == 3 * BLOCK
    assert len(bench.run()) == 3
    for way, counted in bench.store.stats().items():
        blocks = 3 if way == f"{source}>{target}" else 0
        assert (counted["blocks"], counted["bytes"], counted["failed"]) == (blocks, blocks * BLOCK, 0)
        assert counted["in_flight"] == 0
    assert bench.store.queued_bytes(source, target) == 0
    assert bench.store.speed(source, target) is not None


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_source_is_held_until_its_copy_is_acknowledged(source: str, target: str) -> None:
    """PITFALLS 29: its owner lets go of it at once, and nobody else gets it before the copy has landed."""
    bench = Bench()
    place = bench.put(source, 7)
    bench.begin(7, place, target)
    slots = bench.store.slots(source)
    slots.free([place.slot])
    assert slots.state(place.slot) is SlotState.DRAINING
    assert place.slot not in (slots.take(slots.free_count) or [])
    bench.run()
    assert slots.state(place.slot) is SlotState.EMPTY


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_block_that_is_still_filling_is_never_moved_or_counted(source: str, target: str) -> None:
    """PITFALLS 28."""
    bench = Bench()
    (slot,) = bench.store.slots(source).take(1) or [-1]
    with pytest.raises(Exception, match="filling, not ready"):
        bench.begin(7, Place(source, slot), target)
    assert bench.store.pending() == 0
    assert bench.store.stats()[f"{source}>{target}"]["in_flight"] == 0


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_target_can_not_be_read_before_its_copy_has_landed(source: str, target: str) -> None:
    """PITFALLS 28, at the other end."""
    bench = Bench()
    there = bench.begin(7, bench.put(source, 7), target)
    slots = bench.store.slots(target)
    with pytest.raises(Exception, match="filling, not ready"):
        slots.hold(there.slot)
    bench.run()
    slots.hold(there.slot)


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [w for w in WAYS if "hbm" in w])
def test_a_copy_that_the_device_fails_lands_as_failed(source: str, target: str) -> None:
    bench = Bench()
    bench.device.fails = lambda: "the device is on fire"
    there = bench.begin(7, bench.put(source, 7), target)
    (landed,) = bench.run()
    assert landed.failed == "the device is on fire"
    assert bench.store.slots(target).state(there.slot) is SlotState.FILLING
    assert bench.store.staging is not None
    assert bench.store.staging.slots.used_count == 0
    assert bench.store.stats()[f"{source}>{target}"]["failed"] == 1


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), NoSpaceError(28, "No space left on device"),
                                   BadRecordError("checksum", "slot 0"), ValueError("a bug")], ids=repr)
@pytest.mark.parametrize(("source", "target"), [w for w in WAYS if "nvme" in w])
def test_what_a_file_call_raises_lands_as_failed(source: str, target: str, error: Exception) -> None:
    bench = Bench()
    bench.nvme.faults.append(error)
    there = bench.begin(7, bench.put(source, 7), target)
    (landed,) = bench.run()
    assert landed.failed
    assert landed.bad == isinstance(error, BadRecordError)
    assert landed.no_space == isinstance(error, NoSpaceError)
    assert bench.store.slots(target).state(there.slot) is SlotState.FILLING
    assert bench.store.staging is not None
    assert bench.store.staging.slots.used_count == 0


def test_a_bad_record_never_reaches_hbm() -> None:
    bench = Bench()
    place = bench.put("nvme", 7)
    bench.nvme.records[place.slot] = name_of(8).digest, payload(8)
    there = bench.begin(7, place, "hbm")
    before = bench.held(there)
    (landed,) = bench.run()
    assert landed.bad
    assert bench.held(there) == before


@pytest.mark.parametrize("worker", ["reader", "writer"])
def test_a_worker_that_dies_fails_what_it_had_and_what_comes(worker: str) -> None:
    bench = Bench()
    source, target = ("nvme", "ram") if worker == "reader" else ("ram", "nvme")
    bench.begin(1, bench.put(source, 1), target)
    getattr(bench, worker).die()
    bench.begin(2, bench.put(source, 2), target)
    assert [e.key for e in bench.run() if e.failed == "the worker has ended"] == [1, 2]
    assert bench.store.workers()[worker] is False
    # The other tiers go on.
    bench.begin(3, bench.put("hbm", 3), "ram")
    assert [e.failed for e in bench.run()] == [None]


@pytest.mark.parametrize(("source", "target"), [w for w in WAYS if "hbm" in w])
def test_a_copy_that_the_device_refuses_lands_as_failed(source: str, target: str) -> None:
    """Not in the face of whoever began it, and not never."""
    bench = Bench()

    def refuse() -> None:
        raise RuntimeError("no stream is left")

    bench.device.fails = refuse
    place = bench.put(source, 7)
    there = bench.begin(7, place, target)
    if source != "nvme":
        assert select.select([bench.wake.fd], [], [], 0)[0]  # nothing else will say that it has ended
    assert bench.store.pending() == 1
    assert bench.run() == [Landed(7, place, there, "no stream is left")]
    bench.store.slots(source).free([place.slot])
    assert bench.store.slots(source).used_count == 0
    assert bench.store.staging is not None
    assert bench.store.staging.slots.used_count == 0
    # Nor does it stand in the way of others.
    bench.begin(8, bench.put("ram", 8), "nvme")
    assert [e.failed for e in bench.run()] == [None]


def test_a_device_that_is_lost_fails_what_it_had_and_what_comes() -> None:
    bench = Bench("late")
    bench.begin(1, bench.put("hbm", 1), "ram")
    bench.device.die()
    assert [e.failed for e in bench.run()] == ["the device has ended"]
    bench.device._wake = None  # a thread that has ended announces nothing
    bench.begin(2, bench.put("ram", 2), "hbm")
    assert select.select([bench.wake.fd], [], [], 0)[0]
    assert [e.failed for e in bench.run()] == ["the device has ended"]
    assert bench.store.workers() == {"device": False, "reader": True, "writer": True}


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_target_that_is_not_filling_is_refused_and_nothing_begins(source: str, target: str) -> None:
    bench = Bench()
    place, other = bench.put(source, 7), bench.put(target, 8)
    with pytest.raises(SlotError, match="ready, not filling"):
        bench.store.begin(7, place, other, name_of(7))
    assert bench.store.pending() == 0
    bench.store.slots(source).free([place.slot])
    assert bench.store.slots(source).state(place.slot) is SlotState.EMPTY  # it is held by nobody
    assert bench.held(other) == payload(8)


# -- order, and room in staging ----------------------------------------------------------------------------


def test_writes_are_submitted_in_the_order_in_which_they_were_begun() -> None:
    """So a child is never written before its parent, wherever either lies."""
    bench = Bench(random.Random(3), hbm=6, ram=6, staging=3, nvme=12)
    keys = list(range(12))
    for key in keys:
        bench.begin(key, bench.put("ram" if key % 2 else "hbm", key), "nvme")
    bench.run()
    assert bench.nvme.order == [name_of(key).digest for key in keys]


def test_a_write_whose_copy_fails_does_not_hold_up_those_behind_it() -> None:
    bench = Bench()
    fails = iter(["the first copy fails"])
    bench.device.fails = lambda: next(fails, None)
    for key, tier in ((1, "hbm"), (2, "ram"), (3, "hbm")):
        bench.begin(key, bench.put(tier, key), "nvme")
    assert {e.key: e.failed for e in bench.run()} == {1: "the first copy fails", 2: None, 3: None}
    assert bench.nvme.order == [name_of(2).digest, name_of(3).digest]


def test_without_room_in_staging_moves_wait_and_go_on_by_themselves() -> None:
    bench = Bench(hbm=8, staging=1, nvme=8)
    for key in range(4):
        bench.begin(key, bench.put("hbm", key), "nvme")
        bench.begin(key + 4, bench.put("nvme", key + 4), "hbm")
    assert {e.key for e in bench.run() if e.failed is None} == set(range(8))


def test_a_flood_of_writes_leaves_staging_for_restores() -> None:
    bench = Bench(hbm=8, staging=4, nvme=8)
    for key in range(7):
        bench.begin(key, bench.put("hbm", key), "nvme")
    bench.begin(9, bench.put("nvme", 9), "hbm")
    bench.reader.step()
    landed: list[Landed] = []
    for _ in range(3):  # the writer does nothing meanwhile
        landed += bench.store.poll()
    assert [e.key for e in landed] == [9]


@pytest.mark.parametrize(("staging", "kept"), [(1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_writes_leave_a_quarter_of_staging_free(staging: int, kept: int) -> None:
    """But never all of it: one slot serves both."""
    bench = Bench("late", hbm=10, staging=staging, nvme=10)
    for key in range(10):
        bench.begin(key, bench.put("hbm", key), "nvme")
    assert bench.store.staging is not None
    assert bench.store.staging.slots.free_count == kept
    assert len(bench.run()) == 10


def test_restores_take_staging_that_comes_free_before_writes_that_waited_longer() -> None:
    bench = Bench("early", hbm=6, staging=1, nvme=6)
    for key in range(3):
        bench.begin(key, bench.put("hbm", key), "nvme")
    for key in range(3, 6):
        bench.begin(key, bench.put("nvme", key), "hbm")
    assert [e.key for e in bench.run()] == [0, 3, 4, 5, 1, 2]


# -- how long it took --------------------------------------------------------------------------------------


def test_moves_that_are_found_together_are_timed_together() -> None:
    """A step is long and a copy short: four that landed within a second are four blocks a second, not one."""
    bench = Bench("early")
    for key in range(4):
        bench.begin(key, bench.put("hbm", key), "ram")
    bench.now += 1.0
    assert len(bench.store.poll()) == 4
    assert bench.store.speed("hbm", "ram") == 4 * BLOCK
    counted = bench.store.stats()["hbm>ram"]
    assert (counted["seconds"], counted["bytes_per_s"]) == (1.0, 4 * BLOCK)


def test_time_in_which_nothing_moved_is_not_counted() -> None:
    bench = Bench("early")
    for _ in range(3):
        bench.now += 100.0
        place = bench.put("hbm", 1)
        there = bench.begin(1, place, "ram")
        bench.now += 0.5
        assert len(bench.store.poll()) == 1
        bench.store.slots("hbm").free([place.slot])
        bench.store.slots("ram").free([there.slot])
    assert bench.store.stats()["hbm>ram"]["seconds"] == 1.5
    assert bench.store.speed("hbm", "ram") == BLOCK / 0.5


def test_what_waited_for_others_is_timed_from_their_end() -> None:
    bench = Bench("early")
    for key in range(2):
        bench.begin(key, bench.put("ram", key), "nvme")
    for _ in range(2):
        bench.now += 1.0
        bench.writer.step()
        assert len(bench.store.poll()) == 1
    assert bench.store.stats()["ram>nvme"]["seconds"] == 2.0
    assert bench.store.speed("ram", "nvme") == BLOCK


def test_a_slower_disk_shows_in_its_speed() -> None:
    bench = Bench("early", nvme=100)
    for seconds, expected in ((0.1, BLOCK / 0.1), (10.0, BLOCK / 10.0)):
        for key in range(60):
            place = bench.put("ram", key)
            bench.begin(key, place, "nvme")
            bench.now += seconds
            bench.writer.step()
            (end,) = bench.store.poll()
            bench.store.slots("ram").free([place.slot])
            bench.store.slots("nvme").free([end.target.slot])
        assert bench.store.speed("ram", "nvme") == pytest.approx(expected, rel=0.25)


def test_what_failed_has_no_speed() -> None:
    bench = Bench("early")
    bench.device.fails = lambda: "it failed"
    bench.begin(1, bench.put("hbm", 1), "ram")
    bench.now += 1.0
    assert [e.failed for e in bench.store.poll()] == ["it failed"]
    assert bench.store.speed("hbm", "ram") is None
    assert bench.store.stats()["hbm>ram"]["bytes"] == 0


@pytest.mark.parametrize(("absent", "ways"), [
    ("nvme", {"hbm>ram", "ram>hbm"}),
    ("ram", {"hbm>nvme", "nvme>hbm"}),
    ("both", set()),
])
def test_a_store_without_a_tier_tells_of_the_moves_that_there_are(absent: str, ways: set[str]) -> None:
    bench = Bench()
    if absent in ("ram", "both"):
        bench.store.ram = None
    if absent in ("nvme", "both"):
        bench.store.nvme = bench.store.staging = None
    for key, way in enumerate(sorted(ways)):
        source, target = way.split(">")
        bench.begin(key, bench.put(source, key), target)
    assert {e.failed for e in bench.run()} <= {None}
    counted = bench.store.stats()
    assert counted.keys() == ways
    assert all(way["blocks"] == 1 for way in counted.values())
    bench.store.close()
    assert bench.nvme.closed == (absent == "ram")


# -- at rest, and the end ----------------------------------------------------------------------------------


def test_poll_with_nothing_pending_finds_nothing() -> None:
    bench = Bench()
    assert bench.store.poll() == []
    bench.wake.set()
    assert bench.store.poll() == []
    assert not select.select([bench.wake.fd], [], [], 0)[0]


def test_a_poll_clears_the_wake_so_that_the_loop_can_sleep() -> None:
    bench = Bench("early")
    bench.begin(1, bench.put("hbm", 1), "ram")
    bench.begin(2, bench.put("ram", 2), "nvme")  # its writer has not begun
    assert select.select([bench.wake.fd], [], [], 0)[0]
    assert [e.key for e in bench.store.poll()] == [1]
    assert bench.store.pending() == 1
    assert not select.select([bench.wake.fd], [], [], 0)[0]


def test_close_ends_all_that_runs_by_itself() -> None:
    bench = Bench()
    bench.begin(7, bench.put("ram", 7), "nvme")
    bench.store.close()
    assert bench.nvme.closed
    assert bench.nvme.order == [name_of(7).digest]  # what was begun is done
    assert bench.store.workers() == {"device": False, "reader": False, "writer": False}


@pytest.mark.parametrize("order", ["early", "late"])
def test_close_while_moves_are_pending_tells_of_each(order: str) -> None:
    """Those that were with a thread are done, those that waited for one have failed; nothing stays held."""
    bench = Bench(order, hbm=8, ram=9, staging=2, nvme=9)
    key = 0
    for source, target in WAYS:
        for _ in range(2):
            key += 1
            bench.begin(key, bench.put(source, key), target)
    bench.store.close()
    landed = []
    for _ in range(20):
        landed += bench.store.poll()
    assert sorted(e.key for e in landed) == list(range(1, key + 1))
    assert bench.store.pending() == 0
    for end in landed:
        assert bench.store.slots(end.source.tier).state(end.source.slot) is SlotState.READY
        if end.failed is None:
            assert bench.held(end.target) == payload(end.key)
    done = {(e.source.tier, e.target.tier) for e in landed if e.failed is None}
    assert done == {("hbm", "ram"), ("ram", "hbm"), ("nvme", "ram")}  # the writes were in line, behind a copy
    assert bench.store.staging is not None
    assert bench.store.staging.slots.used_count == 0
    bench.begin(99, bench.put("nvme", 99), "ram")
    assert [bool(e.failed) for e in bench.store.poll()] == [True]


def test_over_real_threads_the_wake_tells_when_to_look() -> None:
    bench = Bench("early")
    for worker in ("reader", "writer"):
        setattr(bench.store, worker, ThreadWorker(worker, 2 if worker == "reader" else 1, bench.wake))
    there = bench.begin(7, bench.put("ram", 7), "nvme")
    back = None
    landed: list[Landed] = []
    while len(landed) < 2:
        assert select.select([bench.wake.fd], [], [], 10)[0]
        landed += bench.store.poll()
        if landed and back is None:
            back = bench.begin(7, there, "hbm")
    assert back is not None
    assert bench.held(back) == payload(7)
    bench.store.close()


def test_a_source_that_is_not_held_is_seen_by_the_late_device() -> None:
    """The twin finds out who uses a source again before its copy has ended."""
    bench = Bench("late")
    place = bench.put("hbm", 7)
    there = bench.begin(7, place, "ram")
    bench.device.pool[place.slot] = bytearray(payload(8))  # as one would who did not wait
    bench.run()
    assert bench.held(there) != payload(7)
