"""Host memory in equal slots: the `ram` tier, and the staging that blocks pass through on their way to and from disk.

Knows bytes and slots; does not know which block is where, or who copies.
"""

from __future__ import annotations

import mmap

from tiers.files import pages
from tiers.slots import SlotAllocator


class HostMemory:
    """`capacity` slots of `block_bytes`, each beginning on a page (direct I/O asks for that).

    `memory`: a page-aligned buffer of `capacity * stride` bytes (pinned by its owner); None: anonymous memory, which
    takes no space before it is written.
    """

    def __init__(self, capacity: int, block_bytes: int, memory: memoryview | None = None) -> None:
        self.block_bytes = block_bytes
        self.stride = pages(block_bytes)
        self.slots = SlotAllocator(capacity)
        wanted = capacity * self.stride
        self._memory = memoryview(mmap.mmap(-1, wanted)) if memory is None else memory.cast("B")
        if len(self._memory) < wanted:
            raise ValueError(
                f"{capacity} slots of {self.stride} bytes need {wanted} bytes; {len(self._memory)} were given")

    def view(self, slot: int) -> memoryview:
        """The block's bytes."""
        at = slot * self.stride
        return self._memory[at : at + self.block_bytes]

    def padded(self, slot: int) -> memoryview:
        """The block's bytes, filled up to whole pages with bytes that mean nothing."""
        at = slot * self.stride
        return self._memory[at : at + self.stride]
