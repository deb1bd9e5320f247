"""Threads that do what may wait, and a descriptor that says when something is done.

A worker reports every failure as a result. A thread that ends before its time fails the job that ended it, and shows
it (`alive`); with the last one, all that wait fail. It does not know what its jobs are.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Job = Callable[[], Any]


class Wake:
    """`fd` is readable after `set`, until `clear`. Any thread may set it. Its descriptors go with it."""

    def __init__(self) -> None:
        self.fd, self._in = os.pipe()
        weakref.finalize(self, _close, self.fd, self._in).atexit = False  # threads may still set it then
        os.set_blocking(self.fd, False)
        os.set_blocking(self._in, False)
        #: Whether a byte lies in the pipe. Both change under the lock: where `set` and `clear` meet, the flag would
        #: be wrong for ever, and the loop would spin, or sleep through a result.
        self._is_set = False
        self._lock = threading.Lock()

    def set(self) -> None:
        if not self._is_set:
            with self._lock:
                if not self._is_set:
                    os.write(self._in, b"\0")
                    self._is_set = True

    def clear(self) -> None:
        if self._is_set:
            with self._lock:
                if self._is_set:
                    os.read(self.fd, 1)
                    self._is_set = False


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


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
    """`threads` daemon threads on one queue. Results are (done, value or exception), in the order of their end.

    What nobody is left to do fails too, and is announced like any other result.
    """

    def __init__(self, name: str, threads: int, wake: Wake) -> None:
        self.name = name
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._done: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()
        self._living = threads
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"{name} {i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether all of its threads are."""
        return self._living == len(self._threads)

    def submit(self, job: Job, done: Any) -> None:
        self._jobs.put((job, done))
        if not self._living:
            self._wake.set()

    def results(self) -> list[tuple[Any, Any]]:
        out = []
        while self._done:
            out.append(self._done.popleft())
        if not self._living:
            out += self._left_over()
        return out

    def _left_over(self) -> list[tuple[Any, Any]]:
        """Jobs that no thread has taken, nor will."""
        out: list[tuple[Any, Any]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._jobs.get_nowait()) is not None:
                    out.append((item[1], WorkerDiedError(f"the thread {self.name} has ended")))
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
        try:
            while (item := self._jobs.get()) is not None and self._do(*item):
                pass
        finally:
            with self._lock:
                self._living -= 1
            self._wake.set()  # after the last thread, what still waits has failed

    def _do(self, job: Job, done: Any) -> bool:
        """Whether this thread goes on."""
        value, goes_on = None, True
        try:
            value = job()
        except Exception as error:  # a result like any other
            value = error
        except BaseException as error:  # the end of this thread, and of the job with it
            value, goes_on = WorkerDiedError(f"the thread {self.name} has ended: {error!r}"), False
        self._done.append((done, value))
        self._wake.set()
        return goes_on
