"""The only place that calls the operating system's files; so that a test can put in others (`fake_files.py`).

Knows paths, descriptors and what a call may do short of its promise (read less, write less). Does not know
records, caps or whose a file is. Every method raises `OSError` as the system does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

PAGE = 4096  # what O_DIRECT asks of addresses, offsets and lengths on every disk that we know


class FileFacts(NamedTuple):
    """What `lstat` says, as far as it matters here."""

    size: int
    on_disk: int  # bytes, as `du` counts them
    mtime: float
    identity: tuple[int, int]  # device and inode
    is_directory: bool


def _facts(found: os.stat_result) -> FileFacts:
    return FileFacts(found.st_size, found.st_blocks * 512, found.st_mtime, (found.st_dev, found.st_ino),
                     stat.S_ISDIR(found.st_mode))


class Files:
    """Calls of the operating system, one method each."""

    def open(self, path: str, *, write: bool = False, create: bool = False, direct: bool = False) -> int:
        """A descriptor. What is created is 0600. `direct`: past the page cache (then everything is in pages)."""
        flags = os.O_RDWR if write else os.O_RDONLY
        flags |= (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0) | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read; may be fewer than there is room for."""
        return os.preadv(descriptor, buffers, offset)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written; may be fewer than were given."""
        return os.pwritev(descriptor, buffers, offset)

    def allocate(self, descriptor: int, size: int) -> None:
        """Give the file `size` bytes that can be overwritten without more space."""
        os.posix_fallocate(descriptor, 0, size)

    def truncate(self, path: str, size: int) -> None:
        os.truncate(path, size)

    def facts(self, path: str) -> FileFacts:
        """Of the path itself: a link is not followed."""
        return _facts(os.lstat(path))

    def facts_of(self, descriptor: int) -> FileFacts:
        return _facts(os.fstat(descriptor))

    def entries(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def make_directory(self, path: str) -> None:
        """With its parents; 0700. No error if it is there."""
        os.makedirs(path, mode=0o700, exist_ok=True)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """An empty one."""
        os.rmdir(path)

    def free_space(self, path: str) -> int:
        """Bytes that we could still write on the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, descriptor: int) -> bool:
        """Take the file's lock, if nobody has it. It ends with the descriptor, or with the process."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def pages(n_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def aligned(n_bytes: int) -> memoryview:
    """A page-aligned buffer of zeros."""
    return memoryview(mmap.mmap(-1, n_bytes))


def read_whole(files: Files, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers (of whole pages); fewer bytes come back, in whole pages, only where the file ends."""
    return _whole(files.read, descriptor, buffers, offset)


def write_whole(files: Files, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of the buffers (of whole pages), or raise."""
    wanted = sum(len(b) for b in buffers)
    done = _whole(files.write, descriptor, buffers, offset)
    if done < wanted:
        raise OSError(errno.EIO, f"the disk took {done:,} of {wanted:,} bytes")


def _whole(call: Callable[[int, Sequence[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview],
           offset: int) -> int:
    """Repeat `call` until all is done or nothing more comes. Goes on from whole pages, as O_DIRECT wants it."""
    rest, done = list(buffers), 0
    while rest:
        n = call(descriptor, rest, offset + done)
        n -= n % PAGE
        if n <= 0:
            break
        done += n
        while rest and n >= len(rest[0]):
            n -= len(rest.pop(0))
        if n:
            rest[0] = rest[0][n:]
    return done


def disk_usage(files: Files, path: str) -> int:
    """Bytes that `path` and all below it take, as `du` counts them; what vanishes or is hidden from us counts 0."""
    try:
        facts = files.facts(path)
    except FileNotFoundError:
        return 0
    if not facts.is_directory:
        return facts.on_disk
    try:
        names = files.entries(path)
    except (FileNotFoundError, PermissionError):
        names = []
    return facts.on_disk + sum(disk_usage(files, f"{path}/{name}") for name in names)


def direct_works(files: Files, path: str) -> bool:
    """Whether a page written past the page cache at `path` (which is made, and removed) comes back."""
    out, back = aligned(PAGE), aligned(PAGE)
    out[:] = bytes(range(256)) * (PAGE // 256)
    try:
        descriptor = files.open(path, write=True, create=True, direct=True)
    except OSError:
        return False
    try:
        write_whole(files, descriptor, [out], 0)
        return read_whole(files, descriptor, [back], 0) == PAGE and back == out
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # it could be opened; a full disk says nothing against it
    finally:
        files.close(descriptor)
        files.remove(path)
