"""The cache's directory: who owns it, what lies in it, and that it never grows over its cap.

Knows the lock, names and lengths of files, other fingerprints' files, the free floor. Does not know what is
inside a segment. Rules: docs/disk-format.md.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from tiers.errors import DirectoryError, DirectoryInUseError, NoSpaceError
from tiers.files import FileFacts, Files, direct_works, disk_usage
from tiers.record import Geometry
from tiers.segment import segment_bytes, slots_that_fit

SEGMENT_LIMIT = 256 << 20  # bytes: large enough that tables and files are few, small enough to be given back
MIN_SLOTS = 16  # fewer blocks than this are no cache but a mistake in the unit of the size
FREE_FLOOR = 256 << 20  # bytes that we leave free on the file system, so that others can go on writing
RESERVE = 64 << 10  # bytes of the cap: directories that grow, the lock, the probe of a start
SEGMENT_SLACK = 16 << 10  # bytes of the cap a segment: what a file system needs itself for a file in pieces
LOCK_WAIT_S = 10.0  # a server that is replaced may take this long to end
LOCK_POLL_S = 0.1

SEGMENT_NAME = re.compile(r"[0-9]{6}\.kv")
NAMESPACE_NAME = re.compile(r"[0-9a-f]{2,128}")


class Sizes(NamedTuple):
    """How the cap is used."""

    segments: int  # at most
    slots_each: int
    segment_bytes: int

    @property
    def slots(self) -> int:
        return self.segments * self.slots_each


class Other(NamedTuple):
    """Another fingerprint's segment; oldest first when sorted."""

    mtime: float
    path: str
    on_disk: int


class Scan(NamedTuple):
    """What lies in the directory."""

    total: int  # bytes, as `du` counts them
    ours: dict[int, FileFacts]  # our fingerprint's segments, by number
    others: list[Other]

    @property
    def owed(self) -> int:
        """Bytes that ours may take yet without asking: where somebody made them sparse."""
        return sum(max(0, facts.size - facts.on_disk) for facts in self.ours.values())

    @property
    def rest(self) -> int:
        """Bytes of what is no segment."""
        return self.total - sum(f.on_disk for f in self.ours.values()) - sum(o.on_disk for o in self.others)


class CacheDirectory:
    """Owns `path` from here to `release()`; raises `DirectoryError` where that can't be."""

    def __init__(self, path: str, cap: int, fingerprint: bytes, files: Files, *, floor: int = FREE_FLOOR,
                 clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self.path = path
        self.cap = cap
        self.own = f"{path}/{fingerprint.hex()}"
        self.on_disk = 0  # bytes under `path` when it was last looked at
        self.segments = 0  # ours, then
        self.others_bytes = 0  # of them, other fingerprints'
        self._files = files
        self._floor = floor
        self._lock_path = f"{path}/lock"
        self._lock, self._lock_identity = -1, (0, 0)
        try:
            files.make_directory(path)
            self._wait_for_lock(clock, sleep)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            files.make_directory(self.own)
            self.direct = self._probe()
        except OSError as error:
            self.release()
            raise self._unusable(error) from error

    def segment(self, number: int) -> str:
        """Its path."""
        return f"{self.own}/{number:06}.kv"

    def fit(self, geometry: Geometry, limit: int = SEGMENT_LIMIT) -> Sizes:
        """Decide the sizes, and bring what is there under the cap."""
        try:
            scan = self.scan()
            free = self._files.free_space(self.path)
        except OSError as error:
            raise self._unusable(error) from error
        if self.cap > free + scan.total:
            raise DirectoryError(f"a cap of {self.cap:,} bytes is more than the disk of {self.path} has: {free:,} "
                                 f"bytes are free, and {scan.total:,} are in the directory; give a smaller one")
        sizes = plan(geometry, self.cap - scan.rest - RESERVE, limit)
        if sizes.slots < MIN_SLOTS:
            wanted = 4 * (segment_bytes(geometry, MIN_SLOTS // 4) + SEGMENT_SLACK) + scan.rest + RESERVE
            raise DirectoryError(
                f"a cap of {self.cap:,} bytes for {self.path} has room for {sizes.slots} blocks of "
                f"{geometry.slot_bytes:,} bytes; at least {MIN_SLOTS} are needed, which is {wanted:,} bytes "
                f"({scan.rest:,} of them for files that are no cache): give more")
        try:
            self._shrink(scan, sizes)
        except OSError as error:
            raise self._unusable(error) from error
        return sizes

    def _shrink(self, scan: Scan, sizes: Sizes) -> None:
        for number, facts in scan.ours.items():
            if number >= sizes.segments:
                self._files.remove(self.segment(number))
            elif facts.size > sizes.segment_bytes:
                self._files.truncate(self.segment(number), sizes.segment_bytes)
        scan = self.scan()
        while scan.others and scan.total + scan.owed > self.cap:
            self._remove_other(scan.others[0])
            scan = self.scan()

    def scan(self) -> Scan:
        """Look at everything under the directory."""
        files = self._files
        total, ours, others = files.facts(self.path).on_disk, {}, []
        for name in files.entries(self.path):
            path = f"{self.path}/{name}"
            total += disk_usage(files, path)
            if not NAMESPACE_NAME.fullmatch(name):
                continue
            for file, facts in self._segments(path):
                if path == self.own:
                    ours[int(file[:6])] = facts
                else:
                    others.append(Other(facts.mtime, f"{path}/{file}", facts.on_disk))
        self.on_disk, self.segments, self.others_bytes = total, len(ours), sum(o.on_disk for o in others)
        return Scan(total, dict(sorted(ours.items())), sorted(others))

    def _segments(self, namespace: str) -> list[tuple[str, FileFacts]]:
        try:
            names = [n for n in self._files.entries(namespace) if SEGMENT_NAME.fullmatch(n)]
            found = [(name, self._files.facts(f"{namespace}/{name}")) for name in names]
        except OSError:  # vanished, hidden from us or no directory: it is still counted
            return []
        return [(name, facts) for name, facts in found if not facts.is_directory]

    def allocate(self, number: int, size: int) -> None:
        """Make segment `number`, or give it its whole length; `NoSpaceError` if cap, floor or disk have no room."""
        self._files.make_directory(self.own)
        had = self._make_room(number, size)
        path = self.segment(number)
        descriptor = self._files.open(path, write=True, create=True)
        try:
            self._files.allocate(descriptor, size)
        except OSError:
            if had is None:
                self._files.remove(path)
            else:
                self._files.truncate(path, had.size)
            raise
        finally:
            self._files.close(descriptor)
        self.scan()

    def _make_room(self, number: int, size: int) -> FileFacts | None:
        """Delete others' segments until it fits. Returns what the segment is now."""
        while True:
            scan = self.scan()
            had = scan.ours.pop(number, None)
            on_disk = had.on_disk if had else 0
            over_cap = scan.total + scan.owed + size - on_disk + SEGMENT_SLACK - self.cap
            under_floor = self._floor + size - on_disk - self._files.free_space(self.path)
            if over_cap <= 0 and under_floor <= 0:
                return had
            if not scan.others:
                break
            self._remove_other(scan.others[0])
        if over_cap > 0:
            raise NoSpaceError(errno.ENOSPC, f"a segment of {size:,} bytes would be {over_cap:,} over the cap of "
                                             f"{self.path}: it has files that are not the cache's")
        raise NoSpaceError(errno.ENOSPC, f"a segment of {size:,} bytes would leave less than {self._floor:,} bytes "
                                         f"free on the disk of {self.path}")

    def _remove_other(self, other: Other) -> None:
        self._files.remove(other.path)
        namespace = os.path.dirname(other.path)
        if not self._files.entries(namespace):
            self._files.remove_directory(namespace)

    # -- the lock ----------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """True: ours, as ever. False: it was replaced, and we own what is there now. `OSError`: not ours any more."""
        try:
            if self._files.facts(self._lock_path).identity == self._lock_identity:
                return True
        except FileNotFoundError:
            pass
        if not self._try_lock():
            raise OSError(errno.EBUSY, f"{self.path} was replaced, and process {self._owner()} owns it now")
        return False

    def release(self) -> None:
        """Let another server have it."""
        if self._lock >= 0:
            self._files.close(self._lock)
        self._lock = -1

    def _wait_for_lock(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        until = clock() + LOCK_WAIT_S
        while not self._try_lock():
            if clock() >= until:
                raise DirectoryInUseError(
                    f"{self.path} is in use by process {self._owner()}, for {LOCK_WAIT_S:.0f} s now: stop that server, "
                    f"or give this one another directory")
            sleep(LOCK_POLL_S)

    def _try_lock(self) -> bool:
        descriptor = self._files.open(self._lock_path, write=True, create=True)
        try:
            if not self._files.lock(descriptor):
                self._files.close(descriptor)
                return False
            self._files.write(descriptor, [memoryview(b"%d\n" % os.getpid())], 0)
            identity = self._files.facts_of(descriptor).identity
        except OSError:
            self._files.close(descriptor)
            raise
        self.release()
        self._lock, self._lock_identity = descriptor, identity
        return True

    def _owner(self) -> str:
        text = bytearray(32)
        try:
            descriptor = self._files.open(self._lock_path)
            try:
                n = self._files.read(descriptor, [memoryview(text)], 0)
            finally:
                self._files.close(descriptor)
        except OSError:
            return "(unknown)"
        return bytes(text[:n]).split(b"\n")[0].decode("ascii", "replace") or "(unknown)"

    def _probe(self) -> bool:
        """Whether O_DIRECT works here; raises if nothing can be written here at all."""
        path = f"{self.path}/probe"
        self._files.close(self._files.open(path, write=True, create=True))
        self._files.remove(path)
        return direct_works(self._files, path)

    def _unusable(self, error: OSError) -> DirectoryError:
        return DirectoryError(f"{self.path} can't hold the cache: {error.strerror or error}; give a directory that "
                              f"this process may write into")


def plan(geometry: Geometry, usable: int, limit: int = SEGMENT_LIMIT) -> Sizes:
    """Segments for `usable` bytes: at most `limit` and a quarter of it each, yet at least one slot."""
    each = max(1, slots_that_fit(geometry, min(limit, usable // 4 - SEGMENT_SLACK)))
    size = segment_bytes(geometry, each)
    return Sizes(max(0, usable // (size + SEGMENT_SLACK)), each, size)
