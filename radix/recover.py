"""A restart: the tree of what was found in a lower tier, from records that each name their parent.

Runs without a fork become edges in one piece. A record whose parent is not there, or whose digest is not that of its
tokens behind its parent, is an orphan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radix.digest import block_digest

if TYPE_CHECKING:
    from radix.tree import RadixTree


class Record(NamedTuple):
    """A block as it was found: its root, name and parent, blocks before it, tokens, slot, and a number that grows with
    its age's opposite (the order of writing)."""

    root: bytes
    digest: bytes
    parent: bytes
    depth: int
    tokens: bytes
    slot: int
    order: int


class Recovery(NamedTuple):
    """Blocks that are known again, and slots to free: of orphans, and of older copies."""

    blocks: int
    orphans: list[int]
    duplicates: list[int]


def recover(tree: RadixTree, tier: int, records: Iterable[Record]) -> Recovery:
    """Build it. The tree is empty, or knows none of the blocks."""
    newest: dict[bytes, Record] = {}
    duplicates = []
    for record in (Record(*r) for r in records):
        other = newest.get(record.digest)
        if other is not None:
            older, record = sorted((other, record), key=lambda r: r.order)
            duplicates.append(older.slot)
        newest[record.digest] = record
    children: dict[bytes, list[Record]] = {}
    for record in newest.values():
        children.setdefault(record.parent, []).append(record)
    found = 0
    roots = {r.root for r in newest.values()}
    stack = [(root, -1, root, 0, child) for root in roots for child in children.pop(root, ())]
    orphans = []
    while stack:
        root, parent, name, depth, record = stack.pop()
        run, below = [], [record]
        while len(below) == 1 and _fits(tree, below[0], root, name, depth):
            run.append(below[0])
            name, depth = below[0].digest, depth + 1
            below = children.pop(name, [])
        if not run:
            orphans += _lost(record, children)
            continue
        slots = np.array([r.slot for r in run], np.int32)
        ids = tree.adopt_found(root, parent, tier, b"".join(r.tokens for r in run), slots, _when(tree, run))
        found += len(run)
        stack += [(root, int(ids[-1]), name, depth, child) for child in below]
    orphans += [r.slot for rest in children.values() for r in rest]
    return Recovery(found, orphans, duplicates)


def _fits(tree: RadixTree, record: Record, root: bytes, parent: bytes, depth: int) -> bool:
    return (record.root == root and record.depth == depth and len(record.tokens) == 4 * tree.block_size
            and block_digest(parent, record.tokens) == record.digest)


def _lost(record: Record, children: dict[bytes, list[Record]]) -> list[int]:
    """The slots of a record that fits nowhere, and of all behind it."""
    slots, stack = [], [record]
    while stack:
        one = stack.pop()
        slots.append(one.slot)
        stack += children.pop(one.digest, [])
    return slots


def _when(tree: RadixTree, run: list[Record]) -> float:
    """Older than anything of this process, and in the order of writing."""
    return tree.before_now(max(r.order for r in run))
