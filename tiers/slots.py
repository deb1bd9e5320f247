"""The slot allocator: which slots of a memory are empty, being filled, ready, or on their way out.

    empty ──take──► filling ──ready──► ready ──hold/unhold (readers)──► ready
      ▲               │                  │
      │            abort               free ──► empty, or draining while a reader holds it
      └───────────────┴──────────────────┴───── last unhold of a draining slot

Only `ready` slots may be read, shared or spilled. A pending copy holds both of its ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tiers.errors import SlotError


class SlotState(IntEnum):
    """Where a slot is in its life."""

    EMPTY = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


class SlotAllocator:
    """`capacity` equal slots, numbered from 0; O(1) a slot for every operation.

    Lower numbers are handed out first after a start, and neighbours that were freed together are handed out
    together again, so that a sequence's slots tend to be adjacent.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise SlotError(f"a pool of {capacity} slots holds nothing; at least 1 is needed")
        self.capacity = capacity
        self._state = bytearray(capacity)
        self._holds: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.capacity - len(self._free)

    def state(self, slot: int) -> SlotState:
        return SlotState(self._state[slot])

    def expect(self, slot: int, state: SlotState) -> None:
        """SlotError where the slot is not there, or in another state."""
        if not 0 <= slot < self.capacity:
            raise SlotError(f"there is no slot {slot}: this memory has {self.capacity}, from 0")
        if self._state[slot] != state:
            raise SlotError(f"slot {slot} is {self.state(slot).name.lower()}, not {state.name.lower()}")

    def used(self) -> set[int]:
        """Every slot that is not empty (for audits)."""
        return {i for i, s in enumerate(self._state) if s}

    def take(self, n: int) -> list[int] | None:
        """n empty slots, now `filling`; None, and nothing taken, if there are fewer."""
        if n > len(self._free):
            return None
        taken = self._free[len(self._free) - n:][::-1]
        del self._free[len(self._free) - n:]
        for slot in taken:
            self._state[slot] = SlotState.FILLING
        return taken

    def ready(self, slots: Iterable[int]) -> None:
        """Their bytes are written."""
        for slot in slots:
            self.expect(slot, SlotState.FILLING)
            self._state[slot] = SlotState.READY

    def claim(self, slots: Iterable[int]) -> None:
        """Empty slots that have been found to hold bytes (after a restart): ready."""
        found = set(slots)
        for slot in found:
            self.expect(slot, SlotState.EMPTY)
        for slot in found:
            self._state[slot] = SlotState.READY
        if found:
            self._free = [slot for slot in self._free if slot not in found]

    def ready_slots(self) -> set[int]:
        """Every slot that may be read (for audits)."""
        return {i for i, s in enumerate(self._state) if s == SlotState.READY}

    def abort(self, slots: Iterable[int]) -> None:
        """They will not be written after all: empty again."""
        for slot in sorted(slots, reverse=True):  # so that they are handed out again in order
            self.expect(slot, SlotState.FILLING)
            self._empty(slot)

    def hold(self, slot: int) -> None:
        """A reader (a copy) begins."""
        self.expect(slot, SlotState.READY)
        self._holds[slot] += 1

    def unhold(self, slot: int) -> None:
        """A reader ended; a draining slot becomes empty with its last one."""
        if not 0 <= slot < self.capacity or self._holds[slot] < 1:
            raise SlotError(f"slot {slot} is held by nobody")
        self._holds[slot] -= 1
        if self._holds[slot] == 0 and self._state[slot] == SlotState.DRAINING:
            self._empty(slot)

    def free(self, slots: Iterable[int]) -> None:
        """Nobody wants them any more; one that is being read drains first."""
        for slot in sorted(slots, reverse=True):
            self.expect(slot, SlotState.READY)
            if self._holds[slot]:
                self._state[slot] = SlotState.DRAINING
            else:
                self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._state[slot] = SlotState.EMPTY
        self._free.append(slot)
