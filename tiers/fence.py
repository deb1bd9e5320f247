"""Copies between the device and host memory, and the two fences that keep them in order with computation.

    compute ──writes──► slot ──copy out──►      a spill must not read what is not written yet
    compute ──reads───► slot ◄──copy in──       a restore must not overwrite what is still read

A device may compute asynchronously: a launched computation is ahead of what has been done. Both fences are the same
event, "everything that was launched until now": when a copy out is begun, the source's writer has been launched; when
a slot is taken again for a copy in, its last reader has been. The third order, a computation that reads a restored
slot, needs none: a slot is READY only after `finished` has named its copy.
"""

from __future__ import annotations

from typing import Any, Protocol

Event = Any


class Device(Protocol):
    """What copies need of a device: bytes of one slot, one way or the other."""

    @property
    def alive(self) -> bool:
        """Whether copies go on."""

    def computed(self) -> Event:
        """An event: everything that was launched to compute until now."""

    def copy_out(self, slot: int, into: memoryview, after: Event) -> int:
        """A device slot to host bytes, not before `after`. Returns a ticket."""

    def copy_in(self, slot: int, source: memoryview, after: Event) -> int:
        """Host bytes to a device slot, not before `after`. Returns a ticket."""

    def finished(self) -> list[tuple[int, str | None]]:
        """Tickets of copies that ended since the last call, and why one failed. Never blocks."""

    def close(self) -> None:
        """End after what was begun."""


class DeviceCopies:
    """Both directions, fenced."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def out(self, slot: int, into: memoryview) -> int:
        return self._device.copy_out(slot, into, self._device.computed())

    def into(self, slot: int, source: memoryview) -> int:
        return self._device.copy_in(slot, source, self._device.computed())

    def finished(self) -> list[tuple[int, str | None]]:
        return self._device.finished()
