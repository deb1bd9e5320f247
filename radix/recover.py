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


Place = tuple[bytes, int, bytes]  # root, depth, digest


def recover(tree: RadixTree, tier: int, records: Iterable[Record]) -> Recovery:
    """Build it. The tree is empty, or knows none of the blocks."""
    newest: dict[Place, Record] = {}
    orphans, duplicates = [], []
    latest = 0
    for record in (Record(*r) for r in records):
        latest = max(latest, record.order)
        if len(record.tokens) != 4 * tree.block_size or block_digest(record.parent, record.tokens) != record.digest:
            orphans.append(record.slot)
            continue
        place = record.root, record.depth, record.digest
        if (other := newest.get(place)) is not None:
            older, record = sorted((other, record), key=lambda r: r.order)
            duplicates.append(older.slot)
        newest[place] = record
    children: dict[Place, list[Record]] = {}
    for record in newest.values():
        children.setdefault((record.root, record.depth, record.parent), []).append(record)
    found = _build(tree, tier, children, latest)
    orphans += [r.slot for rest in children.values() for r in rest]
    return Recovery(found, orphans, duplicates)


def _build(tree: RadixTree, tier: int, children: dict[Place, list[Record]], latest: int) -> int:
    """Take what hangs together from the roots on out of `children`; how many blocks that is."""
    found = 0
    roots = [place for place in children if place[1] == 0 and place[0] == place[2]]
    stack = [(-1, child) for root in roots for child in _in_order(children.pop(root))]
    while stack:
        parent, record = stack.pop()
        run, below = [], [record]
        while len(below) == 1:
            run += below
            last = run[-1]
            below = children.pop((last.root, last.depth + 1, last.digest), [])
        slots = np.array([r.slot for r in run], np.int32)
        # One age for a run, that of its newest: older than anything of this process, in the order of writing.
        when = tree.before_now(latest - max(r.order for r in run))
        ids = tree.adopt_found(record.root, parent, tier, b"".join(r.tokens for r in run), slots, when)
        found += len(run)
        stack += [(int(ids[-1]), child) for child in _in_order(below)]
    return found


def _in_order(siblings: list[Record]) -> list[Record]:
    """So that the one with the least tokens is taken from the end first: a node keeps its children in order, and
    puts each behind those that it has."""
    return sorted(siblings, key=lambda r: r.tokens, reverse=True)
