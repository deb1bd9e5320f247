"""Host memory in equal slots: the `ram` tier, and the staging that blocks pass through on their way to and from disk.

Knows bytes and slots; does not know which block is where, or who copies.
"""

from __future__ import annotations

import numpy as np

from tiers.errors import TierError
from tiers.files import PAGE, aligned, pages
from tiers.slots import SlotAllocator


class HostMemory:
    """`capacity` slots of `block_bytes`, each beginning on a page (direct I/O asks for that).

    `memory`: a writable, page-aligned buffer of `capacity * stride` bytes (pinned by its owner); None: anonymous
    memory, which takes no space before it is written. Raises TierError where it can't be had, or is not such a buffer.
    """

    def __init__(self, capacity: int, block_bytes: int, memory: memoryview | None = None) -> None:
        if capacity < 1 or block_bytes < 1:
            raise TierError(f"{capacity} slots of {block_bytes} bytes hold nothing; at least 1 of 1 is needed")
        self.block_bytes = block_bytes
        self.stride = pages(block_bytes)
        wanted = capacity * self.stride
        self._memory = _anonymous(wanted) if memory is None else _given(memory, wanted)
        self.slots = SlotAllocator(capacity)

    def view(self, slot: int) -> memoryview:
        """The block's bytes."""
        at = slot * self.stride
        return self._memory[at : at + self.block_bytes]

    def padded(self, slot: int) -> memoryview:
        """The block's bytes, filled up to whole pages with bytes that mean nothing."""
        at = slot * self.stride
        return self._memory[at : at + self.stride]


def _anonymous(n_bytes: int) -> memoryview:
    try:
        return aligned(n_bytes)
    except (OSError, OverflowError) as error:
        raise TierError(f"{n_bytes:,} bytes of memory can't be had: {error}") from error


def _given(memory: memoryview, wanted: int) -> memoryview:
    memory = memory.cast("B")
    if len(memory) < wanted:
        raise TierError(f"{wanted:,} bytes of memory are needed; {len(memory):,} were given")
    if memory.readonly:
        raise TierError("the memory that was given can't be written")
    if past := np.frombuffer(memory, np.uint8).ctypes.data % PAGE:
        raise TierError(f"the memory that was given begins {past} bytes past a page's begin: direct I/O fails")
    return memory
