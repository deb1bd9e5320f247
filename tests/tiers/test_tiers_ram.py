"""Host memory in slots: where each lies, and what is refused."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tiers import HostMemory, TierError

PAGE = 4096


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize(("block_bytes", "stride"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (368640, 368640)])
def test_every_slot_begins_on_a_page_and_is_padded_to_whole_ones(block_bytes: int, stride: int) -> None:
    """Direct I/O takes nothing else."""
    memory = HostMemory(3, block_bytes)
    assert memory.stride == stride
    first = address(memory.padded(0))
    for slot in range(3):
        assert memory.view(slot).nbytes == block_bytes
        assert memory.padded(slot).nbytes == stride
        assert address(memory.view(slot)) == address(memory.padded(slot)) == first + slot * stride
    assert first % PAGE == 0


def test_slots_do_not_overlap() -> None:
    memory = HostMemory(4, 5000)
    for slot in range(4):
        memory.padded(slot)[:] = bytes([slot + 1]) * memory.stride
    for slot in range(4):
        assert bytes(memory.view(slot)) == bytes([slot + 1]) * 5000


def test_a_fresh_buffer_is_zeros_and_all_of_its_slots_are_empty() -> None:
    memory = HostMemory(2, 100)
    assert bytes(memory.padded(1)) == bytes(PAGE)
    assert memory.slots.capacity == memory.slots.free_count == 2


def test_memory_that_its_owner_pinned_is_used_as_it_is() -> None:
    owned = mmap.mmap(-1, 3 * PAGE)
    memory = HostMemory(2, 100, memoryview(owned))
    memory.view(1)[:] = b"x" * 100
    assert owned[PAGE:PAGE + 100] == b"x" * 100


def test_memory_that_was_given_in_larger_items_is_bytes_all_the_same() -> None:
    owned = mmap.mmap(-1, 2 * PAGE)
    memory = HostMemory(2, 100, memoryview(owned).cast("i"))
    assert memory.view(1).nbytes == 100
    memory.view(1)[:] = b"x" * 100
    assert owned[PAGE:PAGE + 100] == b"x" * 100


def test_memory_that_is_too_small_is_refused_with_the_numbers() -> None:
    """PITFALLS 41."""
    with pytest.raises(TierError, match="12,288 bytes of memory are needed; 8,192 were given"):
        HostMemory(3, 100, memoryview(mmap.mmap(-1, 2 * PAGE)))


def test_memory_that_is_not_there_is_refused_with_the_numbers() -> None:
    """PITFALLS 41: and at once, not when it fills."""
    with pytest.raises(TierError, match=f"{10**15 * PAGE:,} bytes of memory can't be had"):
        HostMemory(10**15, 100)


@pytest.mark.parametrize(("capacity", "block_bytes"), [(0, 100), (-1, 100), (1, 0)])
def test_sizes_that_hold_nothing_are_refused_with_the_numbers(capacity: int, block_bytes: int) -> None:
    """PITFALLS 41."""
    with pytest.raises(TierError, match=f"{capacity} slots of {block_bytes} bytes"):
        HostMemory(capacity, block_bytes)


def test_memory_that_begins_inside_a_page_is_refused() -> None:
    with pytest.raises(TierError, match="begins 8 bytes past a page"):
        HostMemory(1, 100, memoryview(mmap.mmap(-1, 2 * PAGE))[8:])


def test_memory_that_can_not_be_written_is_refused() -> None:
    with pytest.raises(TierError, match="can't be written"):
        HostMemory(1, 100, memoryview(bytes(PAGE)))
