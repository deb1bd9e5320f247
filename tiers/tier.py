"""The small types of a copy: where a block lies, and how its move ended."""

from __future__ import annotations

from typing import NamedTuple

HBM, RAM, NVME = "hbm", "ram", "nvme"


class Place(NamedTuple):
    """A slot of a tier."""

    tier: str
    slot: int


class Landed(NamedTuple):
    """One move that ended. `key` is the caller's name of the block.

    `failed` None: done, the target slot is READY. Else the reason; the target slot is still FILLING, and the caller's.
    `bad`: the source's bytes are not what they should be; the caller drops them there. `no_space`: the target's file
    system is full.
    """

    key: int
    source: Place
    target: Place
    failed: str | None = None
    bad: bool = False
    no_space: bool = False
