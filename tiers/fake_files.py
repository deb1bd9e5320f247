"""Twins of `Files` for tests: one in memory, and one that fails as it is told to.

    MemoryFiles     a file system with a size, in a dictionary; `restart()` is what a new process would find
    FaultyFiles     another's calls, of which the nth of a kind fails, does less than asked, or is torn by a crash
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence

from tiers.files import PAGE, FileFacts, Files, pages


class MemoryFile:
    """A file or a directory."""

    serial = 0

    def __init__(self, is_directory: bool, mtime: float) -> None:
        MemoryFile.serial += 1
        self.identity = (0, MemoryFile.serial)
        self.is_directory = is_directory
        self.mtime = mtime
        self.data = bytearray()
        self.locked_by: int | None = None

    @property
    def on_disk(self) -> int:
        return PAGE if self.is_directory else pages(len(self.data))


class MemoryFiles(Files):
    """Everything in memory, of `size` bytes. `direct`: whether O_DIRECT works (and checks lengths and offsets)."""

    def __init__(self, size: int = 1 << 30, direct: bool = False) -> None:
        self.size = size
        self.direct = direct
        self.tree: dict[str, MemoryFile] = {"/": MemoryFile(True, 0.0)}
        self.time = 0.0
        self._open: dict[int, tuple[MemoryFile, bool]] = {}
        self._next = 3

    def restart(self) -> None:
        """The process ended: descriptors and locks are gone, bytes are there."""
        for descriptor in list(self._open):
            self.close(descriptor)

    def _find(self, path: str) -> MemoryFile:
        if path not in self.tree:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.tree[path]

    def _resize(self, file: MemoryFile, size: int) -> None:
        if pages(size) - file.on_disk > self.free_space("/"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        del file.data[size:]
        file.data.extend(bytes(size - len(file.data)))

    def open(self, path: str, *, write: bool = False, create: bool = False, direct: bool = False) -> int:
        if direct and not self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if create and path not in self.tree:
            self._find(os.path.dirname(path))
            self.time += 1
            self.tree[path] = MemoryFile(False, self.time)
        self._next += 1
        self._open[self._next] = (self._find(path), direct)
        return self._next

    def close(self, descriptor: int) -> None:
        file, _ = self._open.pop(descriptor)
        if file.locked_by == descriptor:
            file.locked_by = None

    def _aligned(self, direct: bool, buffers: Sequence[memoryview], offset: int) -> None:
        if direct and (offset % PAGE or any(len(b) % PAGE for b in buffers)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        file, direct = self._open[descriptor]
        self._aligned(direct, buffers, offset)
        done = 0
        for buffer in buffers:
            got = file.data[offset + done : offset + done + len(buffer)]
            buffer[: len(got)] = got
            done += len(got)
        return done

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        file, direct = self._open[descriptor]
        self._aligned(direct, buffers, offset)
        data = b"".join(buffers)
        if offset + len(data) > len(file.data):
            self._resize(file, offset + len(data))
        file.data[offset : offset + len(data)] = data
        self.time += 1
        file.mtime = self.time
        return len(data)

    def allocate(self, descriptor: int, size: int) -> None:
        file, _ = self._open[descriptor]
        if size > len(file.data):
            self._resize(file, size)

    def truncate(self, path: str, size: int) -> None:
        self._resize(self._find(path), size)

    def _facts(self, file: MemoryFile) -> FileFacts:
        return FileFacts(len(file.data), file.on_disk, file.mtime, file.identity, file.is_directory)

    def facts(self, path: str) -> FileFacts:
        return self._facts(self._find(path))

    def facts_of(self, descriptor: int) -> FileFacts:
        return self._facts(self._open[descriptor][0])

    def entries(self, directory: str) -> list[str]:
        self._find(directory)
        return [os.path.basename(p) for p in self.tree if os.path.dirname(p) == directory and p != "/"]

    def make_directory(self, path: str) -> None:
        if path not in self.tree:
            self.make_directory(os.path.dirname(path))
            self.tree[path] = MemoryFile(True, self.time)

    def remove(self, path: str) -> None:
        self._find(path)
        del self.tree[path]

    def remove_directory(self, path: str) -> None:
        if self.entries(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        del self.tree[path]

    def remove_all(self, path: str) -> None:
        """What `rm -r` does."""
        for known in [p for p in self.tree if p == path or p.startswith(path + "/")]:
            del self.tree[known]

    def free_space(self, path: str) -> int:
        return self.size - sum(f.on_disk for f in self.tree.values())

    def lock(self, descriptor: int) -> bool:
        file, _ = self._open[descriptor]
        if file.locked_by is not None:
            return False
        file.locked_by = descriptor
        return True


class Crash(BaseException):
    """The process ends here. Nothing that handles errors may catch it."""


class FaultyFiles(Files):
    """`inner`'s calls, with faults: `fail`, `short` and `tear` say which call of which method from now on."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self._fail: dict[tuple[str, int], int] = {}
        self._limit: dict[tuple[str, int], tuple[int, bool]] = {}

    def fail(self, method: str, code: int, nth: int = 1, times: int = 1) -> None:
        """The nth call from now (1: the next) of `method`, and `times - 1` after it, raise `OSError(code)`."""
        for n in range(nth, nth + times):
            self._fail[method, self.calls[method] + n] = code

    def short(self, method: str, n_bytes: int, nth: int = 1) -> None:
        """The nth call of `read` or `write` does its first `n_bytes` only, and says so."""
        self._limit[method, self.calls[method] + nth] = (n_bytes, False)

    def tear(self, n_bytes: int, nth: int = 1) -> None:
        """The nth `write` puts its first `n_bytes` on disk, and the process ends (`Crash`)."""
        self._limit["write", self.calls["write"] + nth] = (n_bytes, True)

    def heal(self) -> None:
        """No more faults."""
        self._fail.clear()
        self._limit.clear()

    def _count(self, method: str) -> tuple[int, bool] | None:
        self.calls[method] += 1
        key = (method, self.calls[method])
        if (code := self._fail.pop(key, None)) is not None:
            raise OSError(code, os.strerror(code))
        return self._limit.pop(key, None)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._count("read")
        done = self.inner.read(descriptor, buffers, offset)
        return min(done, limit[0]) if limit else done

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._count("write")
        if limit is None:
            return self.inner.write(descriptor, buffers, offset)
        done = self.inner.write(descriptor, _first(buffers, limit[0]), offset) if limit[0] else 0
        if limit[1]:
            raise Crash
        return done

    def open(self, path: str, *, write: bool = False, create: bool = False, direct: bool = False) -> int:
        self._count("create" if create else "open")
        return self.inner.open(path, write=write, create=create, direct=direct)

    def close(self, descriptor: int) -> None:
        self.inner.close(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        self._count("allocate")
        self.inner.allocate(descriptor, size)

    def truncate(self, path: str, size: int) -> None:
        self._count("truncate")
        self.inner.truncate(path, size)

    def facts(self, path: str) -> FileFacts:
        self._count("facts")
        return self.inner.facts(path)

    def facts_of(self, descriptor: int) -> FileFacts:
        return self.inner.facts_of(descriptor)

    def entries(self, directory: str) -> list[str]:
        self._count("entries")
        return self.inner.entries(directory)

    def make_directory(self, path: str) -> None:
        self._count("make_directory")
        self.inner.make_directory(path)

    def remove(self, path: str) -> None:
        self._count("remove")
        self.inner.remove(path)

    def remove_directory(self, path: str) -> None:
        self.inner.remove_directory(path)

    def free_space(self, path: str) -> int:
        self._count("free_space")
        return self.inner.free_space(path)

    def lock(self, descriptor: int) -> bool:
        return self.inner.lock(descriptor)


def _first(buffers: Sequence[memoryview], n_bytes: int) -> list[memoryview]:
    """The first `n_bytes` of them."""
    kept = []
    for buffer in buffers:
        kept.append(buffer[:n_bytes])
        n_bytes -= len(kept[-1])
    return [b for b in kept if len(b)]
