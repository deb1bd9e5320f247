"""A segment: equal slots and, at the end, a table of what is in them, as docs/disk-format.md has it.

Knows the table's bytes, which slots are open, and how a table is rebuilt from headers. Does not know the
directory, the cap or who asks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiers.errors import BadRecordError
from tiers.files import PAGE, Files, aligned, pages, read_whole, write_whole
from tiers.record import (
    DTYPE_BYTES,
    EMPTY,
    LAYOUT_BYTES,
    SUM,
    VERSION,
    Geometry,
    Header,
    RecordName,
    checksum,
    parse_header,
    text_field,
)

TABLE_MAGIC = b"TRNKTAB\0"
# magic, version, slots, slot bytes, payload bytes, block size, entry bytes, (zeros), fingerprint, dtype, layout
HEAD = struct.Struct("<8sIIQQII8x32s24s96s")
ENTRIES_AT = 256
# state, (zeros), depth, sequence, root, digest, parent, check, payload sum; the token ids follow
ENTRY = "<B3xIQ16s16s16s8sQ"
ENTRY_FIELDS_BYTES = struct.calcsize(ENTRY)

STATE_EMPTY, STATE_OPEN, STATE_LIVE = 0, 1, 2

# Slots are opened together, so that the table is not rewritten for each record: a batch goes to neighbours. Several
# windows, because slots that were evicted one by one lie apart. The product bounds the headers that a start reads.
WINDOW_SLOTS = 64
OPEN_WINDOWS = 4


def table_bytes(geometry: Geometry, n_slots: int) -> int:
    return pages(ENTRIES_AT + n_slots * entry_bytes(geometry) + SUM.size)


def entry_bytes(geometry: Geometry) -> int:
    return ENTRY_FIELDS_BYTES + 4 * geometry.block_size


def segment_bytes(geometry: Geometry, n_slots: int) -> int:
    return n_slots * geometry.slot_bytes + table_bytes(geometry, n_slots)


def slots_that_fit(geometry: Geometry, n_bytes: int) -> int:
    """The largest number of slots whose segment is at most `n_bytes` long."""
    n = max(0, n_bytes // geometry.slot_bytes)
    while n and segment_bytes(geometry, n) > n_bytes:
        n -= 1
    return n


class BadTableError(Exception):
    """The table's bytes are not a table of this geometry. Stays in this room's disk part."""


class ForeignTableError(Exception):
    """A good table, of another fingerprint, dtype or layout."""


class Table:
    """What a segment's slots hold, in the very bytes that go to disk. The writer thread's alone."""

    def __init__(self, geometry: Geometry, n_slots: int) -> None:
        self.geometry = geometry
        self.n_slots = n_slots
        self.buffer = aligned(table_bytes(geometry, n_slots))
        self.states = bytearray(n_slots)  # EMPTY or LIVE, as far as we know
        self.windows: list[int] = []  # those open on disk, oldest first
        self.dirty = False
        self._entry = struct.Struct(f"{ENTRY}{4 * geometry.block_size}s")
        self._column: npt.NDArray[np.uint8] = np.ndarray(
            (n_slots,), np.uint8, self.buffer, ENTRIES_AT, (self._entry.size,))
        self._head()

    def _head(self) -> None:
        g = self.geometry
        HEAD.pack_into(self.buffer, 0, TABLE_MAGIC, VERSION, self.n_slots, g.slot_bytes, g.payload_bytes, g.block_size,
                       self._entry.size, g.fingerprint, text_field(g.dtype, DTYPE_BYTES),
                       text_field(g.layout, LAYOUT_BYTES))

    def put(self, i: int, header: Header) -> None:
        """Slot i holds this record."""
        name = header.name
        self._entry.pack_into(self.buffer, ENTRIES_AT + i * self._entry.size, STATE_LIVE, name.depth, header.sequence,
                              name.root, name.digest, name.parent, header.check, header.payload_sum, name.tokens)
        self.states[i] = STATE_LIVE
        self.dirty = True

    def clear(self, i: int) -> None:
        """Slot i holds nothing that can be used."""
        self.states[i] = STATE_EMPTY
        self.dirty = True

    def records(self) -> Iterator[tuple[int, Header]]:
        """Slot and header of each LIVE entry."""
        entries = self.buffer[ENTRIES_AT : ENTRIES_AT + self.n_slots * self._entry.size]
        for i, (_, depth, sequence, root, digest, parent, check, payload_sum, tokens) in enumerate(
                self._entry.iter_unpack(entries)):
            if self.states[i] == STATE_LIVE:
                yield i, Header(RecordName(root, digest, parent, depth, tokens), sequence, check, payload_sum)

    def is_open(self, i: int) -> bool:
        return i // WINDOW_SLOTS in self.windows

    def open(self, i: int) -> None:
        """Mark slot i and its neighbours to be OPEN in the table that is written next."""
        self.windows = [*self.windows, i // WINDOW_SLOTS][-OPEN_WINDOWS:]

    def seal(self) -> memoryview:
        """The table's bytes, as they are to be on disk now."""
        self._column[:] = np.frombuffer(self.states, np.uint8)
        for window in self.windows:
            self._column[window * WINDOW_SLOTS : (window + 1) * WINDOW_SLOTS] = STATE_OPEN
        SUM.pack_into(self.buffer, len(self.buffer) - SUM.size, checksum(self.buffer[: -SUM.size]))
        return self.buffer

    def unseal(self) -> list[int]:
        """Take the bytes in `buffer` as what a disk had: the OPEN slots, whose headers have to be asked."""
        if SUM.unpack_from(self.buffer, len(self.buffer) - SUM.size)[0] != checksum(self.buffer[: -SUM.size]):
            raise BadTableError
        g = self.geometry
        (magic, version, n_slots, slot_bytes, payload_bytes, block_size, size, fingerprint, dtype,
         layout) = HEAD.unpack_from(self.buffer)
        if (magic, version) != (TABLE_MAGIC, VERSION):
            raise BadTableError
        if (fingerprint, dtype, layout) != (g.fingerprint, text_field(g.dtype, DTYPE_BYTES),
                                            text_field(g.layout, LAYOUT_BYTES)):
            raise ForeignTableError
        if (n_slots, slot_bytes, payload_bytes, block_size, size) != (
                self.n_slots, g.slot_bytes, g.payload_bytes, g.block_size, self._entry.size):
            raise BadTableError
        self.states[:] = np.where(self._column == STATE_LIVE, STATE_LIVE, STATE_EMPTY).astype(np.uint8).tobytes()
        unknown = np.flatnonzero((self._column != STATE_LIVE) & (self._column != STATE_EMPTY))
        return [int(i) for i in unknown]


class Loaded(NamedTuple):
    """A segment's table as it was found."""

    table: Table
    was: str  # "good", "bad" (headers were read) or "foreign"
    read_singly: int
    bad_headers: list[str]  # causes; empty slots are none


def load(files: Files, descriptor: int, geometry: Geometry, n_slots: int) -> Loaded:
    """The table of the segment behind `descriptor`; from the headers where there is no good one."""
    table = Table(geometry, n_slots)
    got = read_whole(files, descriptor, [table.buffer], n_slots * geometry.slot_bytes)
    was = "good"
    try:
        if got < len(table.buffer):
            raise BadTableError
        unknown = table.unseal()
    except ForeignTableError:
        return Loaded(_blank(geometry, n_slots), "foreign", 0, [])
    except BadTableError:
        table, was, unknown = _blank(geometry, n_slots), "bad", list(range(n_slots))
    bad = _read_headers(files, descriptor, table, unknown)
    table.dirty = was == "bad" or bool(unknown)
    return Loaded(table, was, len(unknown), bad)


def _blank(geometry: Geometry, n_slots: int) -> Table:
    table = Table(geometry, n_slots)
    table.dirty = True
    return table


def _read_headers(files: Files, descriptor: int, table: Table, slots: list[int]) -> list[str]:
    page, bad = aligned(PAGE), []
    for i in slots:
        if read_whole(files, descriptor, [page], i * table.geometry.slot_bytes) < PAGE:
            break  # the file ends here, and slots come in order
        try:
            table.put(i, parse_header(page, table.geometry))
        except BadRecordError as error:
            if error.cause != EMPTY:
                bad.append(error.cause)
    return bad


def store(files: Files, descriptor: int, table: Table) -> None:
    """Write the table to its place."""
    write_whole(files, descriptor, [table.seal()], table.n_slots * table.geometry.slot_bytes)
    table.dirty = False
