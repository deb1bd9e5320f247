"""All that lies below HBM, put together: the store, who moves blocks through it and why, and what it tells of itself.

It knows sizes and folders; it does not know the tree's rules, and reads no bytes.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine.core.moves import HBM, NVME, RAM, Moves
from engine.core.persist import Persist
from engine.core.restores import Restores
from engine.core.spills import Spills
from engine.errors import ResourceError
from engine.model.fingerprint import LAYOUT
from tiers import Device, Geometry, HostMemory, Nvme, SlotAllocator, ThreadWorker, TieredStore, TierError, Wake

if TYPE_CHECKING:
    from radix import Path as TokenPath
    from radix import RadixTree
    from radix.recover import Record

#: Host memory that blocks pass through between HBM and NVMe, in blocks.
STAGING_BLOCKS = 64
#: Threads that read NVMe: a second one hides some of the first one's wait.
READERS = 2


@dataclass(frozen=True, slots=True)
class LowerConfig:
    """What of the options the lower tiers need. `ahead`: HBM's next victims that are kept clean, in blocks."""

    block_bytes: int
    block_size: int
    ram: int = 0
    nvme: Path | None = None
    nvme_size: int = 0
    fingerprint: bytes = b""
    secret_check: bytes = b""
    dtype: str = ""
    persist_within: float = 2.0
    nvme_write_limit: int | None = None
    session_idle: float = 600.0
    ahead: int = 64


class Lower:
    """RAM and NVMe under one tree."""

    def __init__(self, tree: RadixTree, store: TieredStore, clock: Callable[[], float], config: LowerConfig) -> None:
        self._tree = tree
        self.store = store
        self._block_bytes = config.block_bytes
        self.moves = Moves(tree, store)
        self.persist = None if store.nvme is None else Persist(
            tree, self.moves, clock, within=config.persist_within, session_idle=config.session_idle,
            write_limit=config.nvme_write_limit, block_bytes=config.block_bytes)
        self.spills = Spills(tree, self.moves, self.persist, ahead=config.ahead, block_bytes=config.block_bytes)
        if self.persist is not None:
            self.persist.landed = self.spills.settle_persisted
        self.restores = Restores(tree, self.moves, self.spills)
        self.recovered = self.orphans = 0
        if store.nvme is not None:
            self._recover(store.nvme)

    @property
    def looks_ahead(self) -> bool:
        return self.store.nvme is not None and self.store.ram is not None

    def tiers(self) -> tuple[str, ...]:
        return HBM, *((RAM,) if self.store.ram else ()), *((NVME,) if self.store.nvme else ())

    def _recover(self, nvme: Nvme) -> None:
        """What a start finds on disk is known again."""
        found = nvme.recover()
        kept = self._tree.recover(NVME, cast("list[Record]", [
            (f.name.root, f.name.digest, f.name.parent, f.name.depth, f.name.tokens, f.slot, f.sequence)
            for f in found]))
        nvme.orphaned([*kept.orphans, *kept.duplicates])
        self.recovered, self.orphans = kept.blocks, len(kept.orphans)

    # -- between two steps -------------------------------------------------------------------------------

    def note(self, owner: str, path: TokenPath) -> None:
        """A running request's path has grown."""
        if self.persist is not None:
            self.persist.note(owner, path)

    def is_coming(self) -> bool:
        """Whether slots of HBM, or leases on its blocks, come free by copies that are under way."""
        return bool(self.spills.leaving or self.restores.orphans()
                    or (self.persist is not None and self.persist.batches()))

    def tend(self) -> None:
        self.restores.tend()
        if self.persist is not None:
            self.persist.tend()
        self.spills.tend()

    def next_due(self) -> float | None:
        """Seconds until `tend` has something to do that no copy's end announces."""
        return None if self.persist is None else self.persist.next_due()

    def flush(self, seconds: float) -> tuple[int, int]:
        """Write all that is in line; returns blocks written and paths left. The one call that waits."""
        if self.persist is None or self.store.nvme is None:
            return 0, 0
        began, before = time.monotonic(), self.persist.written
        while not self.persist.idle() and time.monotonic() - began < seconds:
            if self.persist.is_paused() and not self.persist.batches():
                break  # a disk that fails would keep the server from its end
            self.persist.tend(force=True)
            select.select([self.store.wake.fd], [], [], 0.05)
            self.moves.poll()
        return self.persist.written - before, self.persist.waiting()

    def close(self) -> None:
        self.store.close()

    # -- what it tells -----------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Blocks and bytes of each lower tier, and blocks that a restart found."""
        sizes = {"recovered_blocks": self.recovered}
        for tier in self.tiers()[1:]:
            capacity = self.moves.slots(tier).capacity
            sizes |= {f"{tier}_blocks": capacity, f"{tier}_bytes": capacity * self._block_bytes}
        return sizes

    def notes(self) -> list[str]:
        """For who starts the server."""
        notes = [] if self.store.nvme is None else list(self.store.nvme.facts()["notes"])
        if self.orphans:
            notes.append(f"{self.orphans} blocks on NVMe had lost a parent and were dropped")
        return notes

    def in_use(self) -> dict[str, set[int]]:
        """Slots that the tree must hold, by tier: all in use, less those that copies are filling."""
        return {tier: self.moves.slots(tier).ready_slots() for tier in self.tiers()[1:]}

    def facts(self) -> dict[str, Any]:
        """For /v1/cache/stats."""
        facts: dict[str, Any] = {"moves": self.store.stats(), "workers": self.store.workers(),
                                 "restores_failed": self.restores.failed, "leaving": len(self.spills.leaving)}
        if self.persist is not None:
            facts["persist"] = {"in_line": self.persist.waiting(), "written": self.persist.written,
                                "failed": self.persist.failed, "skipped": self.persist.skipped,
                                "expired": self.persist.expired}
        if self.store.nvme is not None:
            facts["nvme"] = {**self.store.nvme.facts(), "recovered": self.recovered, "orphans": self.orphans}
        return facts


def open_store(config: LowerConfig, hbm_slots: int, device: Callable[[Wake], Device],
               clock: Callable[[], float]) -> TieredStore:
    """The store of a server: its memory, its folder (locked) and its threads. Raises ResourceError."""
    ram = staging = None
    try:  # memory first: the folder is locked once it is ours
        if config.ram:
            ram = HostMemory(config.ram // config.block_bytes, config.block_bytes)
        if config.nvme is not None:
            staging = HostMemory(STAGING_BLOCKS, config.block_bytes)
        nvme = None if config.nvme is None else Nvme(
            config.nvme, config.nvme_size, Geometry(
                fingerprint=config.fingerprint, block_size=config.block_size, payload_bytes=config.block_bytes,
                dtype=config.dtype, layout=LAYOUT), check=config.secret_check or bytes(8))
    except (TierError, OSError) as error:
        raise ResourceError(str(error)) from error
    wake = Wake()
    return TieredStore(device(wake), SlotAllocator(hbm_slots), ram=ram, staging=staging, nvme=nvme,
                       reader=ThreadWorker("nvme reader", READERS, wake), writer=ThreadWorker("nvme writer", 1, wake),
                       wake=wake, block_bytes=config.block_bytes, clock=clock)
