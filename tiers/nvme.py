"""The `nvme` tier: blocks in slots of segment files, found again after a restart.

Knows slots, records and when a table has to be on disk. Does not know what tokens mean, which block to evict,
or threads' queues. Three kinds of threads call it, and share nothing that needs a lock but counters:

    the loop      slots, recover (before the others run), orphaned, facts
    the writer    write, tidy, close: tables and open windows are its alone
    readers       read: opens the file, checks the record, closes the file

The format and its rules are in docs/disk-format.md.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tiers.directory import FREE_FLOOR, SEGMENT_LIMIT, CacheDirectory
from tiers.errors import BadRecordError, NoSpaceError, TierError
from tiers.files import PAGE, Files, aligned, read_whole, write_whole
from tiers.record import (
    CHECK_BYTES,
    REMOVED,
    SHORT,
    TORN_HEADER,
    TORN_PAYLOAD,
    Geometry,
    Header,
    RecordName,
    check_name,
    check_record,
    checksum,
    pack_header,
)
from tiers.segment import Loaded, Table, load, store
from tiers.slots import SlotAllocator

NOTES_KEPT = 32  # messages for people; a disk that fails in turns must not fill the memory


class Recovered(NamedTuple):
    """A record that a start found."""

    slot: int
    name: RecordName
    sequence: int  # the order of writing


class Nvme:
    """Owns `directory` until `close()`. Raises `DirectoryError` if it, or `cap` (bytes), can't be used.

    `check`: 8 bytes that tell one server secret from another. The rest is for tests.
    """

    def __init__(self, directory: str | os.PathLike[str], cap: int, geometry: Geometry, *,
                 check: bytes = bytes(CHECK_BYTES), files: Files | None = None, floor: int = FREE_FLOOR,
                 segment_limit: int = SEGMENT_LIMIT, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        geometry.check()
        if len(check) != CHECK_BYTES:
            raise TierError(f"a check value of {len(check)} bytes; it has {CHECK_BYTES}")
        self.geometry = geometry
        self._check = check
        self._files = files = files or Files()
        self._directory = CacheDirectory(os.path.abspath(directory), cap, geometry.fingerprint, files, floor=floor,
                                         clock=clock, sleep=sleep)
        try:
            self.sizes = self._directory.fit(geometry, segment_limit)
        except BaseException:
            self._directory.release()
            raise
        self.slots = SlotAllocator(self.sizes.slots)
        self._tables: dict[int, Table] = {}  # those that differ from the disk, or have open windows
        self._sequence = 0
        self._lost: deque[int] = deque()  # slots to be EMPTY: from the loop to the writer
        self._to_clear: dict[int, list[int]] = {}  # the writer's, by segment
        self._pages = threading.local()
        self._header = aligned(PAGE)
        self._closed = False
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._notes: deque[str] = deque(maxlen=NOTES_KEPT)
        self._noted: set[str] = set()

    # -- readers -----------------------------------------------------------------------------------------

    def read(self, slot: int, name: RecordName, into: memoryview) -> None:
        """Fill `into` (the stride, page-aligned) with the payload of `name`.

        `BadRecordError`: the slot does not hold it. `OSError`: the disk could not say.
        """
        self._expect_stride(into)
        try:
            page = self._read(slot, into)
            check_record(page, into, self.geometry, name)
        except BadRecordError as error:
            with self._counting:
                self._bad[error.cause] += 1
            self._note(error.cause, f"a record was dropped: {error} (slot {slot} of {self._directory.own})")
            raise
        except OSError as error:
            self._note("read", f"reading from {self._directory.own} failed: {error.strerror or error}")
            raise OSError(error.errno, f"reading slot {slot} failed: {error.strerror or error}") from error
        self._fine("read")

    def _read(self, slot: int, into: memoryview) -> memoryview:
        number, i = divmod(slot, self.sizes.slots_each)
        path = self._directory.segment(number)
        try:
            descriptor = self._files.open(path, direct=self._directory.direct)
        except FileNotFoundError:
            raise BadRecordError(REMOVED, f"{path} is not there any more") from None
        page = self._page()
        try:
            got = read_whole(self._files, descriptor, [page, into], i * self.geometry.slot_bytes)
        finally:
            self._files.close(descriptor)
        if got < self.geometry.slot_bytes:
            raise BadRecordError(SHORT, f"{path} ends {self.geometry.slot_bytes - got:,} bytes before the record does")
        return page

    def _page(self) -> memoryview:
        """This thread's own."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = aligned(PAGE)
        return page

    # -- the writer --------------------------------------------------------------------------------------

    def write(self, slot: int, name: RecordName, payload: memoryview) -> None:
        """Make `slot` the record of `name`; `payload` is the stride, page-aligned.

        `NoSpaceError` or another `OSError`: it can't; what was in the slot is gone.
        """
        self._expect_stride(payload)
        check_name(name, self.geometry)
        number, i = divmod(slot, self.sizes.slots_each)
        try:
            self._hold()
            descriptor = self._open_whole(number)
            try:
                self._write(descriptor, number, i, name, payload)
            finally:
                self._files.close(descriptor)
        except OSError as error:
            reason = f"writing to {self._directory.segment(number)} failed: {error.strerror or error}"
            self._note("write", reason)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (NoSpaceError if full else OSError)(error.errno, reason) from error
        self._fine("write", REMOVED)
        self._counts["written"] += 1

    def _write(self, descriptor: int, number: int, i: int, name: RecordName, payload: memoryview) -> None:
        table = self._table(number, descriptor)
        if not table.is_open(i):
            table.open(i)
            self._store(table, descriptor)
        self._sequence += 1
        header = Header(name, self._sequence, self._check, checksum(payload[: self.geometry.payload_bytes]))
        pack_header(self._header, self.geometry, header)
        table.clear(i)  # what is there if the write fails, nobody knows
        write_whole(self._files, descriptor, [self._header, payload], i * self.geometry.slot_bytes)
        table.put(i, header)

    def _store(self, table: Table, descriptor: int) -> None:
        try:
            store(self._files, descriptor, table)
        except OSError:
            table.windows, table.dirty = [], True  # old, new or torn: no slot is known to be open
            raise
        self._counts["table writes"] += 1

    def _open_whole(self, number: int) -> int:
        """The segment, of whole length, for writing; made where it is not there."""
        path, size = self._directory.segment(number), self.sizes.segment_bytes
        try:
            descriptor = self._files.open(path, write=True, direct=self._directory.direct)
        except FileNotFoundError:
            self._directory.allocate(number, size)
            self._tables[number] = Table(self.geometry, self.sizes.slots_each)
            return self._files.open(path, write=True, direct=self._directory.direct)
        if self._files.facts_of(descriptor).size < size:
            try:
                self._directory.allocate(number, size)
            except OSError:
                self._files.close(descriptor)
                raise
        return descriptor

    def _table(self, number: int, descriptor: int) -> Table:
        """The segment's table, without what was orphaned."""
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = self._loaded(number, descriptor).table
            self._sequence = max([self._sequence, *(h.sequence for _, h in table.records())])
        for i in self._to_clear.pop(number, ()):
            table.clear(i)
        return table

    def _hold(self) -> None:
        """The directory is ours, and what the loop lost is known here; else `OSError`."""
        if not self._directory.hold():
            self._tables.clear()
        while self._lost:
            number, i = divmod(self._lost.popleft(), self.sizes.slots_each)
            self._to_clear.setdefault(number, []).append(i)

    def tidy(self) -> None:
        """Bring the tables on disk up to date, so that a start need not read headers. Raises nothing."""
        try:
            self._hold()
        except OSError as error:
            self._note("write", f"tables of {self._directory.own} can't be written: {error.strerror or error}")
            return
        for number in sorted({*self._tables, *self._to_clear}):
            try:
                self._tidy(number)
            except FileNotFoundError:
                self._tables.pop(number, None)
                self._to_clear.pop(number, None)
            except OSError as error:
                self._note("write", f"the table of {self._directory.segment(number)} can't be written: "
                                    f"{error.strerror or error}")

    def _tidy(self, number: int) -> None:
        descriptor = self._files.open(self._directory.segment(number), write=True, direct=self._directory.direct)
        try:
            table = self._table(number, descriptor)
            whole = self._files.facts_of(descriptor).size >= self.sizes.segment_bytes
            if whole and (table.dirty or table.windows):
                table.windows = []
                self._store(table, descriptor)
        finally:
            self._files.close(descriptor)
        del self._tables[number]

    def close(self) -> None:
        """Tidy, and let the directory go. Nothing is read or written afterwards."""
        if not self._closed:
            self._closed = True
            self.tidy()
            self._directory.release()

    # -- a start -----------------------------------------------------------------------------------------

    def recover(self) -> list[Recovered]:
        """What the directory holds, marked READY in `slots`; once, before the first write.

        A bad disk holds less; it raises nothing.
        """
        newest: dict[bytes, Recovered] = {}
        secrets: Counter[bytes] = Counter()
        for number in self._segments():
            for i, header in self._recover(number):
                self._sequence = max(self._sequence, header.sequence)
                secrets[header.check] += 1
                self._keep_newest(newest, Recovered(number * self.sizes.slots_each + i, header.name, header.sequence))
        found = list(newest.values())
        self.slots.claim([r.slot for r in found])
        self._counts["recovered"] = len(found)
        self._note_secrets(secrets)
        return found

    def _segments(self) -> list[int]:
        try:
            return list(self._directory.scan().ours)
        except OSError as error:
            self._note("read", f"{self._directory.own} can't be read: {error.strerror or error}")
            return []

    def _recover(self, number: int) -> list[tuple[int, Header]]:
        try:
            descriptor = self._files.open(self._directory.segment(number), direct=self._directory.direct)
            try:
                loaded = self._loaded(number, descriptor)
            finally:
                self._files.close(descriptor)
        except OSError as error:
            self._note(f"segment {number}", f"{self._directory.segment(number)} can't be read now, and its records are "
                                            f"not used: {error.strerror or error}")
            return []
        if loaded.table.dirty:
            self._tables[number] = loaded.table
        return list(loaded.table.records())

    def _loaded(self, number: int, descriptor: int) -> Loaded:
        loaded = load(self._files, descriptor, self.geometry, self.sizes.slots_each)
        with self._counting:
            self._bad.update(loaded.bad_headers)
        self._counts["headers read singly"] += loaded.read_singly
        if loaded.was != "good":
            self._counts[f"{loaded.was} tables"] += 1
            self._note(f"{loaded.was} table", f"{self._directory.segment(number)} has a {loaded.was} table")
        return loaded

    def _keep_newest(self, newest: dict[bytes, Recovered], record: Recovered) -> None:
        known = newest.get(record.name.digest)
        if known is not None:
            older, record = sorted((known, record), key=lambda copy: copy.sequence)
            self._lost.append(older.slot)
            self._counts["duplicates"] += 1
        newest[record.name.digest] = record

    def _note_secrets(self, secrets: Counter[bytes]) -> None:
        mine = secrets.pop(self._check, 0)
        if others := sum(secrets.values()):
            self._note("secret", f"{others:,} records in {self._directory.own} were written with another server "
                                 f"secret, {mine:,} with this one: they are kept, but what was salted is not found")

    def orphaned(self, slots: Iterable[int]) -> None:
        """The loop: these READY slots hold records that nothing leads to. Freed; the next start finds them no more."""
        gone = list(slots)
        self._lost.extend(gone)  # before they can be handed out: the writer clears them first, then writes
        self.slots.free(gone)
        self._counts["orphans"] += len(gone)

    # -- for people --------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Counts and sizes (bytes) for statistics; touches no disk."""
        with self._counting:
            bad = dict(self._bad)
            notes = list(self._notes)
        counts = self._counts
        return {
            "directory": self._directory.path, "cap_bytes": self._directory.cap,
            "bytes_on_disk": self._directory.on_disk, "foreign_bytes": self._directory.others_bytes,
            "segments": self._directory.segments, "segments_max": self.sizes.segments,
            "segment_bytes": self.sizes.segment_bytes,
            "slot_bytes": self.geometry.slot_bytes, "used_bytes": self.slots.used_count * self.geometry.slot_bytes,
            "direct": "O_DIRECT" if self._directory.direct else "buffered",
            "recovered": counts["recovered"], "orphans": counts["orphans"], "duplicates": counts["duplicates"],
            "written": counts["written"], "table_writes": counts["table writes"],
            "headers_read_singly": counts["headers read singly"], "bad_tables": counts["bad tables"],
            "foreign_tables": counts["foreign tables"], "torn": bad.get(TORN_HEADER, 0) + bad.get(TORN_PAYLOAD, 0),
            "bad_records": bad, "notes": notes,
        }

    def _note(self, kind: str, text: str) -> None:
        """Once a kind, until that works again."""
        with self._counting:
            if kind not in self._noted:
                self._noted.add(kind)
                self._notes.append(text)

    def _fine(self, *kinds: str) -> None:
        if self._noted:
            with self._counting:
                self._noted.difference_update(kinds)

    def _expect_stride(self, view: memoryview) -> None:
        if view.nbytes != self.geometry.stride:
            raise TierError(f"a buffer of {view.nbytes:,} bytes for a block that takes {self.geometry.stride:,}")
