"""Threads that do what may wait: every end is a result, and a descriptor says that there is one."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Any

import pytest

from tiers import ThreadWorker, Wake
from tiers import worker as module
from tiers.worker import WorkerDiedError


def is_readable(wake: Wake) -> bool:
    return bool(select.select([wake.fd], [], [], 0)[0])


def collect(worker: ThreadWorker, wake: Wake, n: int) -> list[tuple[Any, Any]]:
    """n results, looking only when the wake-up says so."""
    out: list[tuple[Any, Any]] = []
    while len(out) < n:
        assert select.select([wake.fd], [], [], 20)[0], f"no wake-up, and {n - len(out)} results are missing"
        wake.clear()
        out += worker.results()
    return out


class LingeringWake(Wake):
    """Who sets it stays a while before it goes on: the loop looks before a thread that ends is gone."""

    def set(self) -> None:
        super().set()
        time.sleep(0.05)


def end_of_thread() -> None:
    raise SystemExit("this thread ends")


# -- the wake-up -------------------------------------------------------------------------------------------


def test_a_wake_is_readable_from_set_to_clear() -> None:
    wake = Wake()
    assert not is_readable(wake)
    wake.clear()
    for _ in range(2):
        wake.set()
        wake.set()
        assert is_readable(wake)
        wake.clear()
        assert not is_readable(wake)


def test_a_wake_that_is_set_while_it_is_cleared_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop either spins for ever on a descriptor that nothing empties, or sleeps through a result."""
    wake = Wake()
    write = os.write
    clearing = threading.Thread(target=wake.clear)

    def clear_first(fd: int, data: bytes) -> int:
        clearing.start()
        clearing.join(0.1)  # it gets in here, or has to wait
        return write(fd, data)

    monkeypatch.setattr(module.os, "write", clear_first)
    wake.set()
    monkeypatch.undo()
    clearing.join()
    wake.clear()
    assert not is_readable(wake)
    wake.set()
    assert is_readable(wake)


def test_many_threads_set_one_wake_and_none_is_lost() -> None:
    wake, rounds = Wake(), 200
    seen, told = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal told
        for _ in range(rounds):
            with lock:
                told += 1
            wake.set()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while seen < 4 * rounds:
        assert select.select([wake.fd], [], [], 20)[0]
        wake.clear()
        seen = told
    for thread in threads:
        thread.join()
    wake.clear()
    assert not is_readable(wake)


def test_a_wake_lets_its_descriptors_go() -> None:
    fds = set()
    for _ in range(50):
        wake = Wake()
        fds.add(wake.fd)
        del wake
    assert len(fds) < 50


# -- results -----------------------------------------------------------------------------------------------


def test_results_are_told_with_what_the_caller_named_them_by() -> None:
    wake = Wake()
    worker = ThreadWorker("w", 2, wake)
    for i in range(20):
        worker.submit(lambda i=i: i * i, i)  # type: ignore[misc]
    assert sorted(collect(worker, wake, 20)) == [(i, i * i) for i in range(20)]
    assert worker.results() == []
    worker.close()


def test_one_thread_works_in_the_order_of_submit() -> None:
    wake, done = Wake(), []
    worker = ThreadWorker("w", 1, wake)
    for i in range(50):
        worker.submit(lambda i=i: done.append(i), i)  # type: ignore[misc]
    worker.close()
    assert done == list(range(50))
    assert [key for key, _ in worker.results()] == done


def test_the_same_name_twice_is_two_results() -> None:
    wake, key = Wake(), object()
    worker = ThreadWorker("w", 1, wake)
    worker.submit(lambda: 1, key)
    worker.submit(lambda: 2, key)
    assert collect(worker, wake, 2) == [(key, 1), (key, 2)]
    worker.close()


def test_what_a_job_raises_is_its_result_and_the_thread_goes_on() -> None:
    wake = Wake()
    worker = ThreadWorker("w", 1, wake)
    error = OSError(5, "Input/output error")

    def fails() -> None:
        raise error

    worker.submit(fails, "a")
    worker.submit(lambda: "fine", "b")
    assert collect(worker, wake, 2) == [("a", error), ("b", "fine")]
    assert worker.alive
    worker.close()


# -- a thread that ends --------------------------------------------------------------------------------------


def test_a_thread_that_dies_fails_what_it_had_and_what_comes() -> None:
    """All by themselves: each failure is announced by the wake-up, though nobody is there to work."""
    wake, may_end = LingeringWake(), threading.Event()
    worker = ThreadWorker("disk", 1, wake)

    def end() -> None:
        may_end.wait(20)
        end_of_thread()

    worker.submit(end, 0)
    for i in (1, 2, 3):
        worker.submit(lambda: pytest.fail("nobody is there to do this"), i)
    assert worker.alive
    may_end.set()
    results = collect(worker, wake, 4)
    assert [key for key, _ in results] == [0, 1, 2, 3]
    assert all(isinstance(value, WorkerDiedError) for _, value in results)
    assert "disk" in str(results[0][1])
    assert "this thread ends" in str(results[0][1])
    assert not worker.alive
    wake.clear()
    worker.submit(lambda: pytest.fail("nobody is there to do this"), 4)
    assert [key for key, value in collect(worker, wake, 1) if isinstance(value, WorkerDiedError)] == [4]
    worker.close()


def test_of_two_threads_the_other_goes_on_and_the_loss_shows() -> None:
    wake = Wake()
    worker = ThreadWorker("w", 2, wake)
    worker.submit(end_of_thread, 0)
    ((key, value),) = collect(worker, wake, 1)
    assert key == 0
    assert isinstance(value, WorkerDiedError)
    for i in range(10):
        worker.submit(lambda i=i: i, i)  # type: ignore[misc]
    assert collect(worker, wake, 10) == [(i, i) for i in range(10)]
    assert not worker.alive
    worker.close()


def test_a_job_that_still_runs_is_not_given_up_because_another_thread_died() -> None:
    """Its buffer is still being written: whoever was told that it failed would hand it to somebody else."""
    wake, running, may_end = Wake(), threading.Event(), threading.Event()
    worker = ThreadWorker("w", 2, wake)

    def long() -> str:
        running.set()
        may_end.wait(20)
        return "done"

    worker.submit(long, "long")
    assert running.wait(20)
    worker.submit(end_of_thread, "last")
    assert [key for key, _ in collect(worker, wake, 1)] == ["last"]
    assert worker.results() == []
    may_end.set()
    assert collect(worker, wake, 1) == [("long", "done")]
    worker.close()


# -- close -------------------------------------------------------------------------------------------------


def test_close_ends_after_what_was_submitted() -> None:
    wake = Wake()
    worker = ThreadWorker("w", 2, wake)
    for i in range(30):
        worker.submit(lambda i=i: i, i)  # type: ignore[misc]
    worker.close()
    assert sorted(worker.results()) == [(i, i) for i in range(30)]
    assert not worker.alive
    worker.close()


def test_what_is_submitted_after_close_fails_at_once() -> None:
    wake = Wake()
    worker = ThreadWorker("w", 1, wake)
    worker.close()
    worker.results()
    wake.clear()
    worker.submit(lambda: pytest.fail("nobody is there to do this"), "late")
    ((key, value),) = collect(worker, wake, 1)
    assert key == "late"
    assert isinstance(value, WorkerDiedError)


def test_threads_do_not_keep_a_process_alive() -> None:
    worker = ThreadWorker("w", 2, Wake())
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("w "))
    worker.close()
