"""A core with tiers below HBM, on a device that does everything in the worst order that its events allow.

The "KV" is chain_core's: each token's is a hash of all before it, so a stale, torn or foreign byte changes the next
token or trips an assertion. Compute without logits is launched and runs late, as on a GPU's stream; copies run as
early, or as late, as the fences let them. No threads, no files, no time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from chain_core import VOCAB, Bench, ChainRunner, Clock

from engine.core.cache import make_tiered_cache
from engine.core.core import Core
from engine.core.layout import Rows
from engine.core.lower import Lower, LowerConfig
from engine.core.scheduler import Scheduler
from tiers import BadRecordError, HostMemory, RecordName, SlotAllocator, TieredStore, Wake

STAGING = 8


class LazyChainRunner(ChainRunner):
    """Launches what gives no logits; it runs when an event, or logits, ask for it."""

    def __init__(self, slots: int, block_size: int) -> None:
        super().__init__(slots, block_size)
        self._waiting: list[Callable[[], object]] = []
        self.launched = self.ran = 0

    def execute(self, batch: list[Rows]) -> torch.Tensor:
        kept = [r._replace(table=list(r.table)) for r in batch]
        if any(r.logits for r in kept):
            self.run_until(self.launched)
            return super().execute(kept)
        execute = super().execute
        self._launch(lambda: execute(kept))
        return torch.empty(0, VOCAB)

    def copy_slot(self, source: int, target: int) -> None:
        copy = super().copy_slot
        self._launch(lambda: copy(source, target))

    def run_until(self, event: int) -> None:
        while self.ran < event:
            self._waiting.pop(0)()
            self.ran += 1

    def _launch(self, work: Callable[[], object]) -> None:
        self._waiting.append(work)
        self.launched += 1


class ChainDevice:
    """`tiers.Device` over the runner's pool. A copy happens at once, or when its end is asked for; `rng` chooses."""

    def __init__(self, runner: LazyChainRunner, wake: Wake, rng: random.Random) -> None:
        self.runner, self.wake, self.rng = runner, wake, rng
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._ended: list[tuple[int, str | None]] = []
        self._ticket = 0
        self.fail: Callable[[], str | None] = lambda: None
        self.alive = True

    def close(self) -> None:
        self.alive = False

    def computed(self) -> int:
        return self.runner.launched

    def copy_out(self, slot: int, into: memoryview, after: Any) -> int:
        def copy() -> None:
            np.frombuffer(into, np.int64)[:] = self.runner.pool[slot]
        return self._begin(copy, after)

    def copy_in(self, slot: int, source: memoryview, after: Any) -> int:
        def copy() -> None:
            self.runner.pool[slot] = np.frombuffer(source, np.int64)
        return self._begin(copy, after)

    def _begin(self, copy: Callable[[], None], after: int | None) -> int:
        self._ticket += 1
        if after is not None:
            self.runner.run_until(after)
        failed = self.fail()
        if failed is not None:
            self._ended.append((self._ticket, failed))
        elif self.rng.random() < 0.5:
            copy()
            self._ended.append((self._ticket, None))
        else:
            self._late.append((self._ticket, copy))
        self.wake.set()
        return self._ticket

    def finished(self) -> list[tuple[int, str | None]]:
        ended, self._ended = self._ended, []
        self.rng.shuffle(self._late)
        for _ in range(self.rng.randint(0, len(self._late))):
            ticket, copy = self._late.pop()
            copy()
            ended.append((ticket, None))
        if self._late:
            self.wake.set()
        return ended


class InlineWorker:
    """Runs jobs when results are asked for, some now and some later; always in order."""

    def __init__(self, wake: Wake, rng: random.Random) -> None:
        self._jobs: list[tuple[Any, Callable[[], Any]]] = []
        self._wake, self._rng = wake, rng
        self.alive = True
        self.paused = False

    def submit(self, job: Callable[[], Any], done: Any) -> None:
        self._jobs.append((done, job))
        self._wake.set()

    def results(self) -> list[tuple[Any, Any]]:
        out: list[tuple[Any, Any]] = []
        for _ in range(0 if self.paused else self._rng.randint(0, len(self._jobs))):
            done, job = self._jobs.pop(0)
            try:
                out.append((done, job()))
            except Exception as error:
                out.append((done, error))
        if self._jobs:
            self._wake.set()
        return out

    def close(self) -> None:
        self._jobs.clear()


class MemoryNvme:
    """Records in a dict, which may be handed to the next core: a restart."""

    def __init__(self, slots: int, disk: dict[int, tuple[RecordName, bytes]] | None = None) -> None:
        self.slots = SlotAllocator(slots)
        self.disk = {} if disk is None else disk
        self.fail: Callable[[str], Exception | None] = lambda what: None

    def write(self, slot: int, name: RecordName, payload: memoryview) -> None:
        self._maybe_fail("write")
        self.disk[slot] = name, bytes(payload)

    def read(self, slot: int, name: RecordName, into: memoryview) -> None:
        self._maybe_fail("read")
        if slot not in self.disk or self.disk[slot][0].digest != name.digest:
            raise BadRecordError("a stale entry")
        into[:] = self.disk[slot][1][:len(into)]

    def _maybe_fail(self, what: str) -> None:
        error = self.fail(what)
        if error is not None:
            raise error

    def recover(self) -> list[Any]:
        from tiers import Recovered

        self.slots.claim(sorted(self.disk))
        return [Recovered(slot, name, i) for i, (slot, (name, _)) in enumerate(self.disk.items())]

    def orphaned(self, slots: list[int]) -> None:
        self.slots.free(slots)
        for slot in slots:
            del self.disk[slot]

    def facts(self) -> dict[str, Any]:
        return {"direct": False, "notes": []}

    def tidy(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class TieredBench(Bench):
    """A core with tiers, and its parts."""

    device: ChainDevice | None = None
    nvme: MemoryNvme | None = None
    reader: InlineWorker | None = None

    @property
    def lower(self) -> Lower:
        assert self.core.cache.lower is not None
        return self.core.cache.lower

    def moves(self, way: str) -> int:
        """Blocks that were copied that way."""
        return int(self.core.stats()["moves"].get(way, {}).get("blocks", 0))

    def settle(self, steps: int = 20_000) -> None:
        """Until nothing moves and nothing is to be persisted."""
        for _ in range(steps):
            if not self.lower.moves.pending() and (self.lower.persist is None or self.lower.persist.idle()):
                return
            self.clock.now += 0.01
            self.core.tend()
        raise AssertionError("the copies do not come to an end")

    def settle_moves(self, steps: int = 20_000) -> None:
        """Until no copy is under way."""
        for _ in range(steps):
            self.core.tend()
            if not self.lower.moves.pending() and not self.core.has_work():
                return
            self.clock.now += 0.01
        raise AssertionError("the copies do not come to an end")

    def cached(self, name: str) -> dict[str, int]:
        usage = self.last[name].usage
        assert usage is not None
        return dict(usage.cached)


def tiered(slots: int = 40, *, ram: int = 0, nvme: int = 0, disk: dict[int, Any] | None = None, size: int = 4,
           seed: int = 0, step_tokens: int = 32, max_running: int = 16, max_context: int = 4096, within: float = 2.0,
           device: type[ChainDevice] = ChainDevice, ahead: int = 4, max_waiting: int = 1024,
           write_limit: int | None = None, session_idle: float = 600.0) -> TieredBench:
    """A core with `slots` blocks of HBM, `ram` of RAM and `nvme` on "disk"."""
    rng = random.Random(seed)
    clock, wake = Clock(), Wake()
    runner = LazyChainRunner(slots, size)
    made = device(runner, wake, rng)
    disk_tier = MemoryNvme(nvme, disk) if nvme else None
    block_bytes, reader = 8 * size, InlineWorker(wake, rng)
    store = TieredStore(made, SlotAllocator(slots), ram=HostMemory(ram, block_bytes) if ram else None,
                        staging=HostMemory(STAGING, block_bytes) if nvme else None, nvme=disk_tier,  # type: ignore[arg-type]
                        reader=reader, writer=InlineWorker(wake, rng), wake=wake,
                        block_bytes=block_bytes, clock=clock)
    config = LowerConfig(block_bytes, size, ram=ram * block_bytes, persist_within=within, ahead=ahead,
                         nvme_write_limit=write_limit, session_idle=session_idle)
    cache = make_tiered_cache(size, clock, lambda tree: Lower(tree, store, clock, config))
    scheduler = Scheduler(cache, clock, step_tokens=step_tokens, max_running=max_running, max_waiting=max_waiting)
    core = Core(scheduler, runner, vocab_size=VOCAB, max_context=max_context, eos_ids=(), fingerprint=b"print",
                clock=clock, block_bytes=block_bytes)
    return TieredBench(core, runner, clock, device=made, nvme=disk_tier, reader=reader)

