"""Tables: what a start may believe, and what it reads singly. Names follow docs/disk-format.md."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from disk_records import CAP, GEOMETRY, block, cause, open_nvme, put, reopened
from hypothesis import given, settings

from tiers.directory import SEGMENT_SLACK, plan
from tiers.fake_files import FaultyFiles, MemoryFiles
from tiers.nvme import Nvme
from tiers.record import Geometry, RecordName
from tiers.segment import OPEN_WINDOWS, WINDOW_SLOTS, segment_bytes, slots_that_fit, table_bytes

NAMES = [block(n) for n in range(40)]
SEGMENT = f"/cache/{GEOMETRY.fingerprint.hex()}/000000.kv"
EACH = 18  # slots of a segment
TABLE_AT = EACH * GEOMETRY.slot_bytes
SIZE = TABLE_AT + table_bytes(GEOMETRY, EACH)


def filled(n: int = 20, close: bool = True) -> tuple[MemoryFiles, dict[int, RecordName]]:
    """A disk with n records in two segments."""
    files = MemoryFiles()
    nvme = open_nvme(files)
    nvme.recover()
    slots = put(nvme, *NAMES[:n])
    if close:
        nvme.close()
    files.restart()
    return files, dict(zip(slots, NAMES, strict=False))


def good(nvme: Nvme, found: list[tuple[int, RecordName]]) -> set[bytes]:
    """The digests of those that read back right; the others must be misses."""
    return {name.digest for slot, name in found if not cause(nvme, slot, name)}


def found(files: MemoryFiles) -> tuple[Nvme, list[tuple[int, RecordName]]]:
    nvme, records = reopened(files)
    return nvme, [(r.slot, r.name) for r in records]


def digests(names: list[RecordName]) -> set[bytes]:
    return {n.digest for n in names}


def test_a_good_table_is_enough() -> None:
    files, wrote = filled()
    nvme, records = found(files)
    assert dict(records) == wrote
    assert nvme.facts()["headers_read_singly"] == 0


def test_a_start_reads_a_table_at_a_time() -> None:
    memory, _ = filled()
    files = FaultyFiles(memory)
    nvme = open_nvme(files)
    reads = files.calls["read"]
    nvme.recover()
    assert files.calls["read"] - reads == 2


def test_open_slots_are_read_singly() -> None:
    files, wrote = filled(close=False)
    nvme, records = found(files)
    assert dict(records) == wrote
    assert nvme.facts()["headers_read_singly"] == 2 * EACH
    assert not nvme.facts()["bad_tables"]


def test_an_open_slot_whose_header_is_torn_is_empty() -> None:
    files, wrote = filled(close=False)
    files.tree[SEGMENT].data[3 * GEOMETRY.slot_bytes + 40] ^= 1
    nvme, records = found(files)
    assert dict(records) == {slot: name for slot, name in wrote.items() if slot != 3}
    assert nvme.facts()["torn"] == 1


@pytest.mark.parametrize("at", [0, 8, 12, 16, 24, 32, 36, 40, 48, 80, 104, 200, 256, 260, 272, 288, 304, 320, 328,
                                336, 4088])
def test_a_bad_table_costs_its_headers(at: int) -> None:
    files, wrote = filled()
    files.tree[SEGMENT].data[TABLE_AT + at] ^= 1
    nvme, records = found(files)
    assert dict(records) == wrote
    assert nvme.facts()["bad_tables"] == 1
    assert nvme.facts()["headers_read_singly"] == EACH
    assert good(nvme, records) == digests(NAMES[:20])


@pytest.mark.parametrize("close", [True, False])
def test_a_start_that_read_headers_leaves_good_tables(close: bool) -> None:
    files, wrote = filled(close=close)
    if close:
        files.tree[SEGMENT].data[TABLE_AT] ^= 1
    nvme, _ = found(files)
    assert nvme.facts()["headers_read_singly"]
    nvme.close()
    nvme, records = found(files)
    assert dict(records) == wrote
    assert not nvme.facts()["headers_read_singly"]


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, SIZE - 1), value=st.integers(1, 255), closed=st.booleans())
def test_a_flipped_byte_anywhere_in_a_segment_costs_at_most_its_record(at: int, value: int, closed: bool) -> None:
    files, _ = filled(close=closed)
    files.tree[SEGMENT].data[at] ^= value
    nvme, records = found(files)
    lost = {NAMES[at // GEOMETRY.slot_bytes].digest} if at < TABLE_AT else set()
    # A byte of the payload's filling means nothing, so its record is not lost.
    assert digests(NAMES[:20]) - lost <= good(nvme, records) <= digests(NAMES[:20])
    assert {n.digest for _, n in records} <= digests(NAMES[:20])


@settings(max_examples=60, deadline=None)
@given(length=st.one_of(st.integers(0, SIZE), st.integers(0, EACH).map(lambda n: n * GEOMETRY.slot_bytes)),
       closed=st.booleans())
def test_a_short_segment_keeps_what_is_whole(length: int, closed: bool) -> None:
    files, _ = filled(close=closed)
    del files.tree[SEGMENT].data[length:]
    nvme, records = found(files)
    whole = min(length // GEOMETRY.slot_bytes, EACH)
    assert good(nvme, records) == digests(NAMES[:whole] + NAMES[EACH:20])
    # The first write into it gives it its length again, and all is found by the next start.
    nvme.slots.free([slot for slot, name in records if cause(nvme, slot, name)])
    put(nvme, *NAMES[20:40])
    assert len(files.tree[SEGMENT].data) == SIZE or whole == EACH
    nvme, records = found(files)
    assert good(nvme, records) == digests(NAMES[:whole] + NAMES[EACH:20] + NAMES[20:40])


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=300), at=st.integers(0, SIZE - 1))
def test_garbage_in_a_segment_is_never_an_exception(data: bytes, at: int) -> None:
    files, _ = filled()
    files.tree[SEGMENT].data[at : at + len(data)] = data[: SIZE - at]
    nvme, records = found(files)
    assert good(nvme, records) <= digests(NAMES)


def test_a_foreign_segment_is_empty() -> None:
    files, _ = filled()
    other = open_nvme(files, geometry=GEOMETRY._replace(fingerprint=b"G" * 32), cap=4 * CAP)
    other.recover()
    put(other, *NAMES[20:25])
    other.close()
    theirs = SEGMENT.replace(GEOMETRY.fingerprint.hex(), (b"G" * 32).hex())
    files.tree[SEGMENT].data[:] = files.tree[theirs].data[: TABLE_AT] + files.tree[theirs].data[-(SIZE - TABLE_AT):]
    nvme, records = found(files)
    assert {n.digest for _, n in records} == digests(NAMES[EACH:20])
    assert nvme.facts()["foreign_tables"] + nvme.facts()["bad_tables"] == 1


def test_a_foreign_segment_is_empty_and_not_read_singly() -> None:
    files, _ = filled()
    other = open_nvme(files, geometry=GEOMETRY._replace(fingerprint=b"G" * 32), cap=CAP)
    other.recover()
    assert other.sizes.segment_bytes == SIZE
    put(other, *NAMES[20:25])
    other.close()
    theirs = SEGMENT.replace(GEOMETRY.fingerprint.hex(), (b"G" * 32).hex())
    files.tree[SEGMENT] = files.tree.pop(theirs)  # somebody moved the file
    nvme, records = found(files)
    assert {n.digest for _, n in records} == digests(NAMES[EACH:20])
    assert nvme.facts()["foreign_tables"] == 1
    assert nvme.facts()["headers_read_singly"] == 0


# -- windows ---------------------------------------------------------------------------------------------

SMALL = Geometry(b"F" * 32, 4, "float32", "[x]", 100)


def big() -> tuple[FaultyFiles, Nvme]:
    """One disk with segments of over 400 slots."""
    files = FaultyFiles(MemoryFiles())
    nvme = open_nvme(files, 16 << 20, SMALL)
    assert nvme.sizes.slots_each > 400
    nvme.recover()
    return files, nvme


def test_a_table_is_written_once_for_a_window() -> None:
    _, nvme = big()
    put(nvme, *[block(n) for n in range(WINDOW_SLOTS)])
    assert nvme.facts()["table_writes"] == 1
    put(nvme, block(1000))
    assert nvme.facts()["table_writes"] == 2


def test_a_start_reads_at_most_the_open_windows_singly() -> None:
    files, nvme = big()
    names = [block(n) for n in range(400)]
    put(nvme, *names)
    files.inner.restart()  # type: ignore[attr-defined]
    again = open_nvme(files, 16 << 20, SMALL)
    assert {r.name for r in again.recover()} == set(names)
    assert again.facts()["headers_read_singly"] == OPEN_WINDOWS * WINDOW_SLOTS


def test_a_slot_that_was_written_is_live_in_the_next_table() -> None:
    files, nvme = big()
    put(nvme, *[block(n) for n in range(WINDOW_SLOTS)])
    nvme.tidy()
    files.inner.restart()  # type: ignore[attr-defined]
    again = open_nvme(files, 16 << 20, SMALL)
    assert len(again.recover()) == WINDOW_SLOTS
    assert again.facts()["headers_read_singly"] == 0


def test_tables_are_let_go_when_they_are_tidy() -> None:
    _, nvme = big()
    put(nvme, *[block(n) for n in range(1000)])
    assert len(nvme._tables) == nvme.facts()["segments"] > 1
    nvme.tidy()
    assert not nvme._tables
    writes = nvme.facts()["table_writes"]
    nvme.tidy()
    assert nvme.facts()["table_writes"] == writes


# -- sizes -----------------------------------------------------------------------------------------------

@given(payload_bytes=st.integers(1, 3 << 20), block_size=st.integers(1, 512), usable=st.integers(1 << 20, 1 << 40))
def test_segments_fit_the_cap_and_waste_little(payload_bytes: int, block_size: int, usable: int) -> None:
    geometry = Geometry(b"F" * 32, block_size, "float32", "[x]", payload_bytes)
    sizes = plan(geometry, usable)
    assert sizes.segment_bytes == segment_bytes(geometry, sizes.slots_each)
    assert sizes.segments * (sizes.segment_bytes + SEGMENT_SLACK) <= usable
    if sizes.slots_each > 1:
        assert sizes.segments >= 4
        assert sizes.segment_bytes <= 256 << 20
        assert slots_that_fit(geometry, sizes.segment_bytes) == sizes.slots_each
