"""What the disk part's tests share: a small geometry, blocks whose bytes follow from their names, a disk in memory."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from tiers.errors import BadRecordError
from tiers.fake_files import MemoryFiles
from tiers.files import Files, aligned
from tiers.nvme import Nvme, Recovered
from tiers.record import Geometry, RecordName

ROOT = b"R" * 16
GEOMETRY = Geometry(b"F" * 32, 4, "float32", "[layer][K|V][block_size][kv_heads][head_dim]", 5000)
CAP = 1 << 20  # 4 segments of 18 slots of GEOMETRY


def block(n: int, parent: RecordName | None = None, geometry: Geometry = GEOMETRY, root: bytes = ROOT) -> RecordName:
    """The block of the tokens n, n + 1, …"""
    tokens = struct.pack(f"<{geometry.block_size}i", *range(n, n + geometry.block_size))
    before = parent.digest if parent else root
    digest = hashlib.sha256(before + tokens).digest()[:16]
    return RecordName(root, digest, before, parent.depth + 1 if parent else 0, tokens)


def payload(name: RecordName, geometry: Geometry = GEOMETRY) -> memoryview:
    """The stride that `name` has on disk; the filling is not zeros."""
    into = aligned(geometry.stride)
    random = np.random.default_rng(int.from_bytes(name.digest, "little"))
    into[:] = random.integers(0, 256, geometry.stride, np.uint8).tobytes()
    return into


def open_nvme(files: Files, cap: int = CAP, geometry: Geometry = GEOMETRY, path: str = "/cache",
              **options: Any) -> Nvme:
    return Nvme(path, cap, geometry, files=files, **{"floor": 0, **options})


def put(nvme: Nvme, *names: RecordName) -> list[int]:
    """Write the blocks into new slots."""
    slots = nvme.slots.take(len(names))
    assert slots is not None
    for slot, name in zip(slots, names, strict=True):
        nvme.write(slot, name, payload(name, nvme.geometry))
    nvme.slots.ready(slots)
    return slots


def get(nvme: Nvme, slot: int, name: RecordName) -> None:
    """Read the block, and compare every byte of it."""
    into = aligned(nvme.geometry.stride)
    nvme.read(slot, name, into)
    size = nvme.geometry.payload_bytes
    assert into[:size] == payload(name, nvme.geometry)[:size]


def cause(nvme: Nvme, slot: int, name: RecordName) -> str:
    """Why the block can't be read; "" if it can."""
    try:
        get(nvme, slot, name)
    except BadRecordError as error:
        return error.cause
    return ""


def reopened(files: MemoryFiles, nvme: Nvme | None = None, **options: Any) -> tuple[Nvme, list[Recovered]]:
    """After a restart: closed well if `nvme` is given, killed otherwise."""
    if nvme:
        nvme.close()
    files.restart()
    again = open_nvme(files, **options)
    return again, again.recover()
