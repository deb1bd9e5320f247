"""The index: which transcripts are known, who holds what, and what to forget first.

Knows token ids, blocks, leases. Does not know bytes of KV, devices, models or HTTP. Standard library and numpy.
"""

from __future__ import annotations

from radix.digest import block_digest, root_digest
from radix.errors import ArgumentError, LeaseError, RadixError, ResidenceError, StalePathError
from radix.eviction import Facts, Policy, lru
from radix.ghosts import Ghost
from radix.lease import Lease, LeaseInfo
from radix.path import (
    Adopted,
    DuplicateOf,
    Extended,
    Namespace,
    Outcome,
    Partial,
    Path,
    TailKept,
    TailNotKept,
    Victim,
)
from radix.recover import Record, Recovery
from radix.tree import RadixTree

__all__ = [
    "Adopted",
    "ArgumentError",
    "DuplicateOf",
    "Extended",
    "Facts",
    "Ghost",
    "Lease",
    "LeaseError",
    "LeaseInfo",
    "Namespace",
    "Outcome",
    "Partial",
    "Path",
    "Policy",
    "RadixError",
    "RadixTree",
    "Record",
    "Recovery",
    "ResidenceError",
    "StalePathError",
    "TailKept",
    "TailNotKept",
    "Victim",
    "block_digest",
    "lru",
    "root_digest",
]
