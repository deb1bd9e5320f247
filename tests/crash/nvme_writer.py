"""A server that writes for ever, to be killed: `python nvme_writer.py DIRECTORY SEED`.

It writes random blocks into random slots of a small nvme tier, over old ones too, and prints `slot number` after each
that is written. What a block is follows from its number alone. Now and then it tidies.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys

from tiers.files import aligned
from tiers.nvme import Nvme
from tiers.record import Geometry, RecordName

GEOMETRY = Geometry(b"F" * 32, 16, "float32", "[layer][K|V][block_size][kv_heads][head_dim]", 60_000)
CAP = 16 << 20
ROOT = b"R" * 16


def block(number: int) -> RecordName:
    tokens = struct.pack("<16i", *range(number, number + 16))
    return RecordName(ROOT, hashlib.sha256(ROOT + tokens).digest()[:16], ROOT, 0, tokens)


def payload(number: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(8, "little")).digest(GEOMETRY.payload_bytes)


def open_nvme(directory: str) -> Nvme:
    return Nvme(directory, CAP, GEOMETRY, floor=0)


def main(directory: str, seed: int) -> None:
    rng = random.Random(seed)
    nvme = open_nvme(directory)
    nvme.recover()
    buffer = aligned(GEOMETRY.stride)
    for n in range(10**9):
        # Mostly neighbours, as batches are; sometimes anywhere.
        slot = n % nvme.slots.capacity if rng.random() < 0.8 else rng.randrange(nvme.slots.capacity)
        number = seed * 10**6 + n
        buffer[: GEOMETRY.payload_bytes] = payload(number)
        nvme.write(slot, block(number), buffer)
        print(slot, number, flush=True)
        if rng.random() < 0.01:
            nvme.tidy()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
