"""Threads that do what may wait, and a descriptor that says when something is done.

A worker reports every failure as a result. A thread that ends before its time fails the job that ended it, and shows
it (`alive`); with the last one, all that wait fail. It does not know what its jobs are.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Job = Callable[[], Any]


class Wake:
    """`fd` is readable after `set`, until `clear`. Any thread may set it."""

    def __init__(self) -> None:
        self.fd, self._in = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._in, False)
        self._is_set = False

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            with contextlib.suppress(BlockingIOError):  # it is full, so it is readable
                os.write(self._in, b"\0")

    def clear(self) -> None:
        if self._is_set:
            with contextlib.suppress(BlockingIOError):
                os.read(self.fd, 4096)
            self._is_set = False


class WorkerDiedError(Exception):
    """The thread that was to do this has ended."""


class Worker(Protocol):
    """Jobs in, results out; neither call waits."""

    @property
    def alive(self) -> bool: ...
    def submit(self, job: Job, done: Any) -> None: ...
    def results(self) -> list[tuple[Any, Any]]: ...
    def close(self) -> None: ...


class ThreadWorker:
    """`threads` daemon threads on one queue. Results are (done, value or exception), in the order of their end."""

    def __init__(self, name: str, threads: int, wake: Wake) -> None:
        self.name = name
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._done: deque[tuple[Any, Any]] = deque()
        self._pending: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"{name} {i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(t.is_alive() for t in self._threads)

    def submit(self, job: Job, done: Any) -> None:
        with self._lock:
            self._pending[id(done)] = done
        self._jobs.put((job, done))

    def results(self) -> list[tuple[Any, Any]]:
        out = []
        while self._done:
            done, value = self._done.popleft()
            with self._lock:
                if self._pending.pop(id(done), None) is None:
                    continue  # it was given up when the thread died
            out.append((done, value))
        if self._pending and not any(t.is_alive() for t in self._threads):
            with self._lock:
                lost, self._pending = list(self._pending.values()), {}
            out += [(done, WorkerDiedError(f"the thread {self.name} has ended")) for done in lost]
        return out

    def close(self) -> None:
        """Ends after what has been submitted."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            ends = False
            try:
                value = job()
            except Exception as error:  # a result like any other
                value = error
            except BaseException as error:  # the end of this thread, and of the job with it
                value, ends = WorkerDiedError(f"the thread {self.name} has ended: {error!r}"), True
            self._done.append((done, value))
            self._wake.set()
            if ends:
                return
