"""How fast blocks move between HBM, RAM and NVMe, beside what this machine does with the same bytes.

    python -m bench.tiers [--quick] [--json FILE] [--folder DIR]

Each rate is a whole path through the store (its threads, checksums, headers), in blocks of SmolLM2-135M in bf16. The
machine's own: one thread that copies the same bytes in memory, and plain reads and writes of the same sizes, in
the way (direct or buffered) that the NVMe tier uses on this folder. Interleaved, in one run.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.harness import Row, arguments, middle, report
from engine.core.lower import LowerConfig, open_store
from engine.core.transfer import CpuDevice
from tiers import Place, RecordName, TieredStore

LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 30, 3, 64, 16
BLOCK_BYTES = LAYERS * 2 * BLOCK * KV_HEADS * HEAD_DIM * 2
SEGMENT_ALIGN = 4096


class Rig:
    """A pool, a store under it, and n blocks to move."""

    def __init__(self, n: int, folder: Path) -> None:
        self.n = n
        pool = torch.randn(LAYERS, 2, KV_HEADS, n, BLOCK, HEAD_DIM).to(torch.bfloat16)
        config = LowerConfig(BLOCK_BYTES, BLOCK, ram=n * BLOCK_BYTES, nvme=folder, nvme_size=8 * n * BLOCK_BYTES,
                             fingerprint=b"bench" + bytes(27), dtype="bfloat16")
        self.store: TieredStore = open_store(config, n, lambda wake: CpuDevice(pool, wake.set), time.monotonic)
        self.slots = {tier: self.store.slots(tier).take(n) for tier in ("hbm", "ram", "nvme")}
        self.names = [RecordName(bytes(16), i.to_bytes(16, "little"), bytes(16), i, bytes(4 * BLOCK))
                      for i in range(n)]
        self.store.slots("hbm").ready(self.slots["hbm"])

    def move(self, source: str, target: str) -> float:
        """All blocks, begun at once; seconds until the last has landed."""
        slots = self.store.slots(target)
        if any(slots.state(s).name == "READY" for s in self.slots[target]):
            slots.free(self.slots[target])
            self.slots[target] = slots.take(self.n)
        began = time.perf_counter()
        for i in range(self.n):
            self.store.begin(i, Place(source, self.slots[source][i]), Place(target, self.slots[target][i]),
                             self.names[i] if "nvme" in (source, target) else None)
        while self.store.pending():
            select.select([self.store.wake.fd], [], [], 0.05)
            for landed in self.store.poll():
                if landed.failed:
                    raise SystemExit(f"{source} to {target} failed: {landed.failed}")
        return time.perf_counter() - began


def copy_in_memory(source: np.ndarray, target: np.ndarray) -> float:
    """One thread, blocks of the same size, each from one place in memory to another."""
    began = time.perf_counter()
    for to, block in zip(target, source, strict=True):
        np.copyto(to, block)
    return time.perf_counter() - began


def plain_file(folder: Path, n: int, *, direct: bool) -> tuple[float, float]:
    """Seconds to write and to read n records one after another."""
    size = -(-BLOCK_BYTES // SEGMENT_ALIGN) * SEGMENT_ALIGN + SEGMENT_ALIGN
    buffer = mmap.mmap(-1, size)
    path = folder / "plain"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (getattr(os, "O_DIRECT", 0) if direct else 0), 0o600)
    try:
        os.posix_fallocate(fd, 0, n * size)
        began = time.perf_counter()
        for i in range(n):
            os.pwritev(fd, [buffer], i * size)
        wrote = time.perf_counter() - began
        began = time.perf_counter()
        for i in range(n):
            os.preadv(fd, [buffer], i * size)
        return wrote, time.perf_counter() - began
    finally:
        os.close(fd)
        path.unlink()
        buffer.close()


def measure(folder: Path, n: int, repeats: int) -> list[Row]:
    rig = Rig(n, folder / "tier")
    assert rig.store.nvme is not None
    direct = rig.store.nvme.facts()["direct"] == "O_DIRECT"
    there, here = (np.full((n, BLOCK_BYTES), i, np.uint8) for i in (1, 2))  # written: pages that are new are slow
    paths = [("hbm", "ram"), ("ram", "hbm"), ("ram", "nvme"), ("nvme", "ram"), ("hbm", "nvme"), ("nvme", "hbm")]
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        seconds.setdefault("memory", []).append(copy_in_memory(there, here))
        wrote, read = plain_file(folder, n, direct=direct)
        seconds.setdefault("write", []).append(wrote)
        seconds.setdefault("read", []).append(read)
        for source, target in paths:
            seconds.setdefault(f"{source} to {target}", []).append(rig.move(source, target))
    rig.store.close()
    own = {"hbm to ram": "memory", "ram to hbm": "memory", "ram to nvme": "write", "hbm to nvme": "write",
           "nvme to ram": "read", "nvme to hbm": "read"}
    gigabytes = n * BLOCK_BYTES / 1e9
    how = "direct" if direct else "buffered"
    rows = []
    for name, label in (("memory", "memory to memory, one thread"), ("write", f"plain write, {how}"),
                        ("read", f"plain read, {how}")):
        took, spread = middle(seconds[name][1:])
        rows.append(Row(label, gigabytes / took, "GB/s", spread))
    for name, limit in own.items():
        took, spread = middle(seconds[name][1:])
        rows += [Row(name, gigabytes / took, "GB/s", spread), Row(f"{name}, tokens", n * BLOCK / took, "tok/s"),
                 Row(f"{name}, of the machine's own ({limit})", middle(seconds[limit][1:])[0] / took, "ratio")]
    return rows


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the NVMe tier is to lie (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(Path(folder), 128 if options.quick else 512, 3 if options.quick else 5)
    report("Copies between tiers", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
