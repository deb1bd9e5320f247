"""Twins of what runs by itself, for tests: a device that does everything in the worst order that its events allow, and
a worker that works when it is told to. No threads and no time, so that a failure can be repeated.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tiers.worker import Job, Wake, WorkerDiedError

Pool = npt.NDArray[np.uint8]
Order = Literal["early", "late"] | random.Random


class WorstCaseDevice:
    """`tiers.fence.Device` over a pool `[slots, block_bytes]`.

    What is launched to compute runs as late as can be: when an event or `sync` asks for it. A copy runs at once
    ("early"), when its end is asked for ("late"), or either, by chance. So a copy that does not wait for the event
    reads what is not written yet, or is overwritten by what still runs; and whoever uses a slot again before its copy
    has ended is found out.
    """

    def __init__(self, slots: int, block_bytes: int, order: Order, wake: Wake | None = None) -> None:
        self.pool: Pool = np.zeros((slots, block_bytes), np.uint8)
        self.alive = True
        self.fails: Callable[[], str | None] = lambda: None
        self._order = order
        self._wake = wake
        self._launched: deque[Callable[[Pool], None]] = deque()
        self._number_launched = self._number_run = 0
        self._late: list[tuple[int, int, Callable[[], None]]] = []
        self._ended: list[tuple[int, str | None]] = []
        self._ticket = 0

    def launch(self, work: Callable[[Pool], None]) -> None:
        """A computation: it reads and writes the pool when it runs."""
        self._launched.append(work)
        self._number_launched += 1

    def sync(self) -> None:
        """All that was launched has run."""
        self._run_until(self._number_launched)

    # -- tiers.fence.Device ------------------------------------------------------------------------------

    def computed(self) -> int:
        return self._number_launched

    def copy_out(self, slot: int, into: memoryview, after: int | None) -> int:
        def copy() -> None:
            into[:] = self.pool[slot].tobytes()
        return self._begin(copy, after)

    def copy_in(self, slot: int, source: memoryview, after: int | None) -> int:
        def copy() -> None:
            self.pool[slot] = np.frombuffer(source, np.uint8)
        return self._begin(copy, after)

    def finished(self) -> list[tuple[int, str | None]]:
        while self._late and (self._order == "late" or self._by_chance()):
            self._copy_a_late_one()
        ended, self._ended = self._ended, []
        return ended

    def die(self) -> None:
        """As a device that is lost: what it has begun and not done fails."""
        self.alive = False
        self._ended += [(ticket, "the device has ended") for ticket, _, _ in self._late]
        self._late.clear()

    def close(self) -> None:
        while self._late:
            self._copy_a_late_one()
        self.alive = False

    # -- inside ------------------------------------------------------------------------------------------

    def _begin(self, copy: Callable[[], None], after: int | None) -> int:
        self._ticket += 1
        failed = self.fails() if self.alive else "the device has ended"
        if failed is not None:
            self._ended.append((self._ticket, failed))
        elif self._order == "early" or (self._order != "late" and self._by_chance()):
            self._run_until(after or 0)
            copy()
            self._ended.append((self._ticket, None))
        else:
            self._late.append((self._ticket, after or 0, copy))
        if self._wake is not None:
            self._wake.set()
        return self._ticket

    def _copy_a_late_one(self) -> None:
        ticket, after, copy = self._late.pop()
        self._run_until(after)
        copy()
        self._ended.append((ticket, None))

    def _by_chance(self) -> bool:
        return isinstance(self._order, random.Random) and self._order.random() < 0.5

    def _run_until(self, number: int) -> None:
        while self._number_run < number:
            self._launched.popleft()(self.pool)
            self._number_run += 1


class SteppedWorker:
    """`tiers.worker.Worker` that does a job when `step` is called: in the order of `submit`, or another, as several
    threads would."""

    def __init__(self, wake: Wake | None = None) -> None:
        self.alive = True
        self._wake = wake
        self._jobs: deque[tuple[Job, Any]] = deque()
        self._done: list[tuple[Any, Any]] = []

    def submit(self, job: Job, done: Any) -> None:
        if self.alive:
            self._jobs.append((job, done))
        else:
            self._end(done, WorkerDiedError("the worker has ended"))

    def step(self, which: int = 0) -> bool:
        """The job that is `which` from the front; False if there is none."""
        if which >= len(self._jobs):
            return False
        job, done = self._jobs[which]
        del self._jobs[which]
        try:
            self._end(done, job())
        except Exception as error:
            self._end(done, error)
        return True

    def die(self) -> None:
        """As a thread that ends: what is left of its jobs fails."""
        self.alive = False
        while self._jobs:
            self._end(self._jobs.popleft()[1], WorkerDiedError("the worker has ended"))

    def results(self) -> list[tuple[Any, Any]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        while self.step():
            pass
        self.alive = False

    def _end(self, done: Any, value: Any) -> None:
        self._done.append((done, value))
        if self._wake is not None:
            self._wake.set()
