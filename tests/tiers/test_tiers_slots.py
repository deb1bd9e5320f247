"""The slot allocator against a model of it that is too simple to be wrong."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tiers import SlotAllocator, SlotError, SlotState, TierError

EMPTY, FILLING, READY, DRAINING = SlotState.EMPTY, SlotState.FILLING, SlotState.READY, SlotState.DRAINING


class SlotMachine(RuleBasedStateMachine):
    """Every call, right or wrong. The model is two dicts: a slot's state, and its readers."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[int, SlotState] = {}
        self.readers: dict[int, int] = {}

    filling = Bundle("filling")
    ready = Bundle("ready")
    any_slot = st.integers(0, 11)

    @initialize(capacity=st.integers(1, 12))
    def begin(self, capacity: int) -> None:
        self.slots = SlotAllocator(capacity)
        self.state = dict.fromkeys(range(capacity), EMPTY)
        self.readers = dict.fromkeys(range(capacity), 0)

    def number(self, state: SlotState) -> int:
        return list(self.state.values()).count(state)

    # -- what is allowed ---------------------------------------------------------------------------------

    @rule(target=filling, n=st.integers(0, 5))
    def take(self, n: int) -> object:
        free = self.number(EMPTY)
        taken = self.slots.take(n)
        if n > free:
            assert taken is None
            return multiple()
        assert taken is not None
        assert len(set(taken)) == n
        assert all(self.state[slot] is EMPTY for slot in taken)
        self.state.update(dict.fromkeys(taken, FILLING))
        return multiple(*taken)

    @rule(target=ready, slot=consumes(filling))
    def written(self, slot: int) -> object:
        if self.state[slot] is not FILLING:
            return multiple()
        self.slots.ready([slot])
        self.state[slot] = READY
        return slot

    @rule(slot=consumes(filling))
    def abort(self, slot: int) -> None:
        if self.state[slot] is FILLING:
            self.slots.abort([slot])
            self.state[slot] = EMPTY

    @rule(slot=ready)
    def hold(self, slot: int) -> None:
        if self.state[slot] is READY:
            self.slots.hold(slot)
            self.readers[slot] += 1

    @rule(slot=ready)
    def unhold(self, slot: int) -> None:
        if self.readers[slot]:
            self.slots.unhold(slot)
            self.readers[slot] -= 1
            if not self.readers[slot] and self.state[slot] is DRAINING:
                self.state[slot] = EMPTY

    @rule(slot=ready)
    def free(self, slot: int) -> None:
        if self.state[slot] is READY:
            self.slots.free([slot])
            self.state[slot] = DRAINING if self.readers[slot] else EMPTY

    @rule(target=ready, data=st.data())
    def claim(self, data: st.DataObject) -> object:
        """After a restart: what was found."""
        empty = [s for s, state in self.state.items() if state is EMPTY]
        found = data.draw(st.lists(st.sampled_from(empty), unique=True)) if empty else []
        self.slots.claim(found)
        self.state.update(dict.fromkeys(found, READY))
        return multiple(*found)

    @rule()
    def free_all(self) -> None:
        """Several at once."""
        ready = [s for s, state in self.state.items() if state is READY]
        self.slots.free(ready)
        self.state.update({s: DRAINING if self.readers[s] else EMPTY for s in ready})

    # -- what is not -------------------------------------------------------------------------------------

    @rule(slot=any_slot, call=st.sampled_from(["ready", "abort", "free", "claim"]))
    def wrong_change(self, slot: int, call: str) -> None:
        slot %= len(self.state)
        if self.state[slot] is not {"free": READY, "claim": EMPTY}.get(call, FILLING):
            with pytest.raises(SlotError, match=f"slot {slot} is {self.state[slot].name.lower()}"):
                getattr(self.slots, call)([slot])

    @rule(slot=any_slot)
    def wrong_hold(self, slot: int) -> None:
        """What fills must not be read, and what drains gets no new readers."""
        slot %= len(self.state)
        if self.state[slot] is not READY:
            with pytest.raises(SlotError, match=f"slot {slot} is {self.state[slot].name.lower()}, not ready"):
                self.slots.hold(slot)

    @rule(slot=any_slot)
    def wrong_unhold(self, slot: int) -> None:
        slot %= len(self.state)
        if not self.readers[slot]:
            with pytest.raises(SlotError, match=f"slot {slot} is held by nobody"):
                self.slots.unhold(slot)

    @rule(data=st.data())
    def too_many(self, data: st.DataObject) -> None:
        """Nothing is taken when there is less than was asked for."""
        more = self.number(EMPTY) + data.draw(st.integers(1, 3))
        assert self.slots.take(more) is None

    # -- always ------------------------------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        if not self.state:
            return
        assert {s: self.slots.state(s) for s in self.state} == self.state
        assert self.slots.ready_slots() == {s for s, state in self.state.items() if state is READY}
        assert self.slots.used() == {s for s, state in self.state.items() if state is not EMPTY}
        assert self.slots.free_count == self.number(EMPTY)
        assert self.slots.used_count + self.slots.free_count == self.slots.capacity


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_that_holds_nothing_is_refused_with_its_number(capacity: int) -> None:
    with pytest.raises(SlotError, match=str(capacity)):
        SlotAllocator(capacity)


def test_a_fresh_pool_hands_out_neighbours_from_the_first_on() -> None:
    slots = SlotAllocator(8)
    assert slots.take(3) == [0, 1, 2]
    assert slots.take(0) == []
    assert slots.take(5) == [3, 4, 5, 6, 7]
    assert slots.take(1) is None


def test_a_slot_that_is_read_is_handed_out_only_after_its_last_reader() -> None:
    slots = SlotAllocator(1)
    assert slots.take(1) == [0]
    slots.ready([0])
    slots.hold(0)
    slots.hold(0)
    slots.free([0])
    assert slots.state(0) is DRAINING
    slots.unhold(0)
    assert slots.take(1) is None
    slots.unhold(0)
    assert slots.take(1) == [0]
    assert slots.state(0) is FILLING


def test_a_slot_cannot_be_freed_twice_while_it_drains() -> None:
    slots = SlotAllocator(2)
    slots.take(1)
    slots.ready([0])
    slots.hold(0)
    slots.free([0])
    with pytest.raises(SlotError, match="draining, not ready"):
        slots.free([0])
    slots.unhold(0)
    assert slots.free_count == 2


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_is_not_there_is_named(slot: int) -> None:
    slots = SlotAllocator(4)
    for operation in (slots.hold, slots.unhold, lambda s: slots.free([s]), lambda s: slots.ready([s])):
        with pytest.raises(SlotError, match=str(slot)):
            operation(slot)


def test_neighbours_that_were_freed_together_are_handed_out_in_order() -> None:
    slots = SlotAllocator(9)
    taken = slots.take(9)
    assert taken is not None
    slots.ready(taken)
    slots.free([5, 4, 3])
    assert slots.take(3) == [3, 4, 5]


def test_what_a_restart_found_is_not_handed_out() -> None:
    slots = SlotAllocator(5)
    slots.claim([3, 1])
    assert slots.ready_slots() == {1, 3}
    assert slots.take(3) == [0, 2, 4]
    assert slots.take(1) is None
    slots.free([1])
    assert slots.take(1) == [1]


def test_a_claim_of_a_slot_in_use_claims_none() -> None:
    slots = SlotAllocator(4)
    slots.take(4)
    slots.abort([0, 1, 2])
    with pytest.raises(SlotError, match="slot 3 is filling, not empty"):
        slots.claim([0, 1, 3])
    assert slots.ready_slots() == set()
    assert slots.take(3) == [0, 1, 2]


def test_a_slot_error_is_the_room_s() -> None:
    assert issubclass(SlotError, TierError)
