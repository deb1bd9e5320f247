"""What a tier promises: two-phase copies and a closed set of outcomes.

The device pool (`hbm`) is driven by the runner and uses only the slot allocator. `ram`, `nvme` and `shared`
are `Tier`s: nothing they do blocks the engine's loop, and what is pending is visible and can't be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Look(Enum):
    """Answers of a look-up."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class CopyOutcome(NamedTuple):
    """How a copy of one block ended; `failed` is a reason, None when it was done."""

    block: int
    slot: int
    failed: str | None = None


class Tier(Protocol):
    """A place for blocks below the device."""

    name: str

    def look(self, block: int) -> Look:
        """Whether `block` can be read here now."""

    def begin_store(self, blocks: Sequence[int]) -> Sequence[int | None]:
        """Take a slot for each block; None where there is no room. The slots are `filling`."""

    def begin_load(self, blocks: Sequence[int]) -> Sequence[int | None]:
        """Hold each block's slot for reading; None where it is not here."""

    def poll(self) -> Sequence[CopyOutcome]:
        """Copies that ended since the last call. Never blocks."""

    def drop(self, blocks: Sequence[int]) -> Sequence[int]:
        """Free the blocks' slots; returns those dropped (a block with a pending copy stays)."""
