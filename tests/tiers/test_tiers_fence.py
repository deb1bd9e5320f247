"""What the fences ask of a device, and in which order its twin runs what it was asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from test_tiers_store import BLOCK, Bench, payload

from tiers import DeviceCopies, Place
from tiers.fake_device import WorstCaseDevice

ORDERS = ["early", "late", "any 1", "any 2", "any 3"]


def order_of(name: str) -> Any:
    return name if name in ("early", "late") else random.Random(name)


def host(byte: bytes = b"\0") -> memoryview:
    return memoryview(bytearray(byte * BLOCK))


def writes(slot: int, byte: bytes) -> Callable[[Any], None]:
    def write(pool: Any) -> None:
        pool[slot] = bytearray(byte * BLOCK)
    return write


def end_of(copies: DeviceCopies) -> list[tuple[int, str | None]]:
    """Asked until it says something: by chance it says nothing yet."""
    for _ in range(1000):
        if ended := copies.finished():
            return ended
    raise AssertionError("the copy does not end")


class Recorder:
    """A device that only notes what it was asked for; each event is a new number."""

    alive = True

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.events = 0

    def computed(self) -> int:
        self.events += 1
        return self.events

    def copy_out(self, slot: int, into: memoryview, after: Any) -> int:
        self.asked.append(("out", slot, bytes(into), after))
        return 10 * self.events

    def copy_in(self, slot: int, source: memoryview, after: Any) -> int:
        self.asked.append(("in", slot, bytes(source), after))
        return 10 * self.events

    def finished(self) -> list[tuple[int, str | None]]:
        return [(10, None), (20, "it broke")]

    def close(self) -> None:
        self.asked.append(("close",))


# -- what is asked of a device -----------------------------------------------------------------------------


def test_each_copy_waits_for_an_event_of_its_own_recorded_when_it_began() -> None:
    """An event from before would leave out what was launched since."""
    device = Recorder()
    copies = DeviceCopies(device)
    assert [copies.out(3, host(b"a")), copies.into(4, host(b"b")), copies.out(5, host(b"c"))] == [10, 20, 30]
    assert device.asked == [("out", 3, b"a" * BLOCK, 1), ("in", 4, b"b" * BLOCK, 2), ("out", 5, b"c" * BLOCK, 3)]


def test_what_has_ended_is_what_the_device_says() -> None:
    assert DeviceCopies(Recorder()).finished() == [(10, None), (20, "it broke")]


# -- in the worst order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_spill_reads_what_was_launched_before_it_and_not_what_came_before_that(order: str) -> None:
    device = WorstCaseDevice(1, BLOCK, order_of(order))
    copies, into = DeviceCopies(device), host()
    device.launch(writes(0, b"a"))
    device.launch(writes(0, b"b"))
    ticket = copies.out(0, into)
    assert end_of(copies) == [(ticket, None)]
    assert bytes(into) == b"b" * BLOCK


@pytest.mark.parametrize("order", ORDERS)
def test_a_fence_waits_for_nothing_that_is_launched_later(order: str) -> None:
    """Else a device that always computes would never copy."""
    device = WorstCaseDevice(2, BLOCK, order_of(order))
    copies, ran = DeviceCopies(device), []
    copies.out(0, host())
    device.launch(lambda _: ran.append(1))
    end_of(copies)
    assert ran == []
    device.sync()
    assert ran == [1]


@pytest.mark.parametrize("order", ORDERS)
def test_a_computation_after_a_restore_reads_what_was_restored(order: str) -> None:
    """The third order needs no fence: who waits for `finished` before it launches is right in every order."""
    device = WorstCaseDevice(1, BLOCK, order_of(order))
    copies, read = DeviceCopies(device), []
    copies.into(0, host(b"r"))
    end_of(copies)
    device.launch(lambda pool: read.append(bytes(pool[0])))
    device.sync()
    assert read == [b"r" * BLOCK]


def test_the_third_order_is_seen_by_the_late_twin_where_nobody_waits_for_the_end() -> None:
    """So it is a rule that a test can break: a slot is READY only after `finished`."""
    device = WorstCaseDevice(1, BLOCK, "late")
    read: list[bytes] = []
    DeviceCopies(device).into(0, host(b"r"))
    device.launch(lambda pool: read.append(bytes(pool[0])))
    device.sync()
    assert read == [bytes(BLOCK)]


# -- where one is missing -------------------------------------------------------------------------------


class NoSpillFence(DeviceCopies):
    def out(self, slot: int, into: memoryview) -> int:
        return self._device.copy_out(slot, into, None)


class NoRestoreFence(DeviceCopies):
    def into(self, slot: int, source: memoryview) -> int:
        return self._device.copy_in(slot, source, None)


def spilled_while_it_is_computed(copies: type[DeviceCopies], target: str, order: Any) -> bytes:
    bench = Bench(order)
    bench.store._copies = copies(bench.device)
    (slot,) = bench.store.hbm.take(1) or [-1]

    def compute(pool: Any) -> None:
        pool[slot] = bytearray(payload(7))

    bench.device.launch(compute)
    bench.store.hbm.ready([slot])  # launched is as good as computed: whoever reads it comes after
    there = bench.begin(7, Place("hbm", slot), target)
    bench.run()
    return bench.held(there)


def restored_while_it_is_read(copies: type[DeviceCopies], source: str, order: Any) -> tuple[bytes, bytes]:
    """(what the computation read, what is in the slot in the end)"""
    bench = Bench(order, hbm=1)
    bench.store._copies = copies(bench.device)
    old = bench.put("hbm", 1)
    read: list[bytes] = []
    bench.device.launch(lambda pool: read.append(bytes(pool[old.slot])))
    bench.store.hbm.free([old.slot])  # its request has ended; what it launched has not
    there = bench.begin(7, bench.put(source, 7), "hbm")
    assert there == old
    bench.run()
    bench.device.sync()
    return read[0], bench.held(there)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("target", ["ram", "nvme"])
def test_a_spill_that_does_not_wait_for_its_source_is_seen(target: str, order: str) -> None:
    """PITFALLS 26."""
    assert spilled_while_it_is_computed(DeviceCopies, target, order_of(order)) == payload(7)
    assert spilled_while_it_is_computed(NoSpillFence, target, order_of(order)) == bytes(BLOCK)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["ram", "nvme"])
def test_a_restore_into_a_slot_that_is_still_read_is_seen(source: str, order: str) -> None:
    """PITFALLS 26."""
    assert restored_while_it_is_read(DeviceCopies, source, order_of(order)) == (payload(1), payload(7))
    read, _ = restored_while_it_is_read(NoRestoreFence, source, order_of(order))
    assert read == payload(7)  # the old request reads another's KV


# -- the twin ----------------------------------------------------------------------------------------------


def test_an_early_copy_has_happened_when_it_was_begun_and_is_told_when_asked() -> None:
    device = WorstCaseDevice(1, BLOCK, "early")
    device.pool[0] = bytearray(b"x" * BLOCK)
    into = host()
    ticket = device.copy_out(0, into, None)
    assert bytes(into) == b"x" * BLOCK
    assert device.finished() == [(ticket, None)]
    assert device.finished() == []


def test_an_early_copy_runs_no_more_than_its_event_asks_for() -> None:
    device = WorstCaseDevice(1, BLOCK, "early")
    ran: list[int] = []
    for i in range(3):
        device.launch(lambda _, i=i: ran.append(i))  # type: ignore[misc]
    device.copy_out(0, host(), device.computed() - 1)
    assert ran == [0, 1]
    device.copy_out(0, host(), None)
    assert ran == [0, 1]


def test_late_copies_happen_when_their_end_is_asked_for_and_the_last_one_first() -> None:
    device = WorstCaseDevice(2, BLOCK, "late")
    one, two = host(), host()
    tickets = [device.copy_out(0, one, None), device.copy_out(1, two, None)]
    device.pool[0] = device.pool[1] = bytearray(b"y" * BLOCK)
    assert device.finished() == [(ticket, None) for ticket in reversed(tickets)]
    assert bytes(one) == bytes(two) == b"y" * BLOCK


def test_computations_run_in_the_order_in_which_they_were_launched() -> None:
    device = WorstCaseDevice(1, BLOCK, "late")
    ran: list[int] = []
    for i in range(3):
        device.launch(lambda _, i=i: ran.append(i))  # type: ignore[misc]
    assert ran == []
    device.copy_out(0, host(), device.computed() - 1)
    device.finished()
    assert ran == [0, 1]  # as late as the event allows
    device.sync()
    assert ran == [0, 1, 2]


def test_a_chance_can_be_repeated() -> None:
    def told(seed: int) -> list[list[tuple[int, str | None]]]:
        device = WorstCaseDevice(1, BLOCK, random.Random(seed))
        for _ in range(8):
            device.copy_out(0, host(), None)
        return [device.finished() for _ in range(6)]

    assert told(5) == told(5)
    assert len({str(told(seed)) for seed in range(10)}) > 1


def test_a_copy_that_fails_by_plan_moves_nothing() -> None:
    device = WorstCaseDevice(1, BLOCK, "early")
    device.fails = lambda: "out of order"
    ticket = device.copy_in(0, host(b"z"), None)
    assert device.finished() == [(ticket, "out of order")]
    assert bytes(device.pool[0]) == bytes(BLOCK)


def test_a_device_that_is_closed_has_done_what_was_begun_and_does_no_more() -> None:
    device = WorstCaseDevice(1, BLOCK, "late")
    done = device.copy_in(0, host(b"z"), None)
    device.close()
    assert bytes(device.pool[0]) == b"z" * BLOCK
    refused = device.copy_in(0, host(b"q"), None)
    assert device.finished() == [(done, None), (refused, "the device has ended")]
    assert not device.alive
    assert bytes(device.pool[0]) == b"z" * BLOCK


def test_a_device_that_is_lost_fails_what_it_has_not_done_and_keeps_what_it_has() -> None:
    device = WorstCaseDevice(2, BLOCK, "late")
    into = host()
    first = device.copy_out(0, into, None)
    device.finished()
    lost = device.copy_in(1, host(b"z"), None)
    device.die()
    assert first != lost
    assert device.finished() == [(lost, "the device has ended")]
    assert bytes(device.pool[1]) == bytes(BLOCK)
