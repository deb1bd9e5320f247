"""The CPU's copies between the device pool and host memory: one thread, and bytes alone.

On a CPU a step is over when `execute` returns: whatever was launched before a copy begins has been computed, so the
events that the fences ask for need no waiting. (A GPU records them on its stream.) A block leaves and enters in the
layout of lower tiers, `[layer][K|V][block_size][kv_heads][head_dim]`, one contiguous run of bytes.

numpy copies, not torch: it lets go of the interpreter's lock as torch does, but brings no team of OpenMP threads
of its own to the two cores that compute.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

#: numpy has no bfloat16; bytes are all that matters here.
_CARRIERS = {2: torch.int16, 4: torch.int32}

_Job = tuple[int, int, memoryview, bool]


class CpuDevice:
    """`tiers.Device` over a pool `[layers, 2, kv_heads, slots, block_size, head_dim]`. `notify` is called, from its
    thread, when a copy has ended."""

    def __init__(self, pool: Tensor, notify: Callable[[], None]) -> None:
        carried = pool.view(_CARRIERS[pool.element_size()]).numpy()
        #: [slots, layers, 2, block_size, kv_heads, head_dim], a view
        self._blocks = carried.transpose(3, 0, 1, 4, 2, 5)
        self._shape = self._blocks.shape[1:]
        self._notify = notify
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: deque[tuple[int, str | None]] = deque()
        self._pending: set[int] = set()
        self._ticket = 0
        self._over, self._reason = False, "the thread that copies has ended"
        self._thread = threading.Thread(target=self._work, name="device copies", daemon=True)
        self._thread.start()

    def computed(self) -> object:
        """Everything launched has been computed already."""
        return None

    def copy_out(self, slot: int, into: memoryview, after: object) -> int:
        return self._begin(slot, into, out=True)

    def copy_in(self, slot: int, source: memoryview, after: object) -> int:
        return self._begin(slot, source, out=False)

    def finished(self) -> list[tuple[int, str | None]]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        self._pending.difference_update(ticket for ticket, _ in ended)
        if self._pending and not self.alive and not self._ended:
            ended += [(ticket, self._reason) for ticket in self._pending]
            self._pending.clear()
        return ended

    @property
    def alive(self) -> bool:
        return not self._over

    def close(self) -> None:
        if self.alive:
            self._jobs.put(None)
            self._thread.join()

    def _begin(self, slot: int, host: memoryview, *, out: bool) -> int:
        self._ticket += 1
        self._pending.add(self._ticket)
        self._jobs.put((self._ticket, slot, host, out))
        return self._ticket

    def _work(self) -> None:
        try:
            self._copy_all()
        except BaseException as error:  # it ends before its time, and what is pending fails
            self._reason = f"the thread that copies has ended: {error!r}"
        self._over = True
        self._notify()

    def _copy_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            ticket, slot, host, out = job
            failed = None
            try:
                outside = np.frombuffer(host, self._blocks.dtype).reshape(self._shape)
                np.copyto(*((outside, self._blocks[slot]) if out else (self._blocks[slot], outside)))
            except Exception as error:  # reported, whatever it is: nobody watches this thread
                failed = f"{type(error).__name__}: {error}"
            self._ended.append((ticket, failed))
            self._notify()
