"""An edge of the tree: a run of tokens as `bytes`, the ids of their blocks, and what hangs below its end.

A node knows nothing of tiers' rules, leases' owners or time; it knows counts that others keep in it, so that a
question about a whole edge is one comparison:

    resident[t]   how many of its blocks are in tier t (in the top tier: its first ones, HBM is prefix-closed)
    kids[t]       how many children (the tail included) have their first block in tier t
    covered       how many of its blocks, from its head, are under a lease
    held          how many children (the tail included) are covered at all

The **tail** is the one node that may be shorter than a block: one block id, 1 to block_size - 1 tokens, no
children, in the top tier only. It hangs beside the children, not among them.

Blocks that are forgotten from an edge's end only lower `n`; the arrays are cut when somebody next reads them
(`trim`), so forgetting 8,000 blocks one by one does not copy the edge 8,000 times.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np

from radix.blocks import IntArray

if TYPE_CHECKING:
    from radix.lease import Lease

TOKEN_BYTES = 4
NEVER = float("-inf")


class Node:
    """See the module. `start` is the number of blocks before it, `n` the number of its blocks."""

    __slots__ = (
        "blocks", "children", "covered", "doomed", "held", "id", "is_tail", "keys", "kids", "leases", "n",
        "parent", "pending_use", "pending_uses", "resident", "slack", "start", "tail", "tokens",
    )  # fmt: skip

    def __init__(
        self, id: int, parent: Node | None, start: int, tokens: bytes, blocks: IntArray, n_tiers: int
    ) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.blocks = blocks
        self.n = len(blocks)
        self.slack = False  # the arrays are longer than n
        self.children: dict[bytes, Node] = {}  # by the tokens of their first block
        self.keys: list[bytes] = []  # the children's keys in order: neighbours agree longest
        self.tail: Node | None = None
        self.is_tail = False
        self.doomed = False  # a tail that a child repeats, kept only because it is leased
        self.resident = [0] * n_tiers
        self.kids = [0] * n_tiers
        self.covered = 0
        self.held = 0
        self.leases: list[Lease] = []  # those that end in this node
        self.pending_use = NEVER  # a last use and a number of uses that count for each of its blocks
        self.pending_uses = 0

    @property
    def end(self) -> int:
        """Number of blocks before what hangs below it."""
        return self.start + self.n

    def attach(self, child: Node, stride: int) -> None:
        key = child.tokens[:stride]
        self.children[key] = child
        bisect.insort(self.keys, key)

    def detach(self, child: Node, stride: int) -> None:
        key = child.tokens[:stride]
        del self.children[key]
        del self.keys[bisect.bisect_left(self.keys, key)]

    def trim(self, stride: int) -> None:
        """Cut the arrays to what is still known."""
        self.tokens = self.tokens[: self.n * stride]
        self.blocks = self.blocks[: self.n].copy()
        self.slack = False


class Root(Node):
    """The first node of a namespace: no blocks, no tokens, not in the table."""

    __slots__ = ("name",)

    def __init__(self, name: bytes, n_tiers: int) -> None:
        super().__init__(-1, None, 0, b"", np.empty(0, np.int32), n_tiers)
        self.name = name


class Nodes(list[Node]):
    """All nodes but the roots, by their id (which is what the `node` column holds); gaps hold a dead root."""

    def __init__(self) -> None:
        super().__init__()
        self._gap = Root(b"", 0)
        self._free: list[int] = []

    @property
    def live(self) -> int:
        return len(self) - len(self._free)

    def reserve(self) -> int:
        """An id for a node that is about to be made."""
        if self._free:
            return self._free.pop()
        self.append(self._gap)
        return len(self) - 1

    def add(self, node: Node) -> None:
        self[node.id] = node

    def discard(self, node: Node) -> None:
        self[node.id] = self._gap
        self._free.append(node.id)


def common_tokens(a: bytes, a_at: int, a_end: int, b: bytes, b_at: int, b_end: int) -> int:
    """How many tokens `a[a_at:a_end]` and `b[b_at:b_end]` share from their heads (offsets in bytes)."""
    size = min(a_end - a_at, b_end - b_at)
    if size <= 1024:  # two short runs: the lowest bit that differs between two integers
        differing = int.from_bytes(a[a_at : a_at + size], "little") ^ int.from_bytes(
            b[b_at : b_at + size], "little"
        )
        if not differing:
            return size // TOKEN_BYTES
        return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
    count = size // TOKEN_BYTES
    left = np.frombuffer(a, np.int32, count, a_at)
    right = np.frombuffer(b, np.int32, count, b_at)
    unequal = left != right
    first = int(unequal.argmax())
    return first if unequal[first] else count


def common_head(a: bytes, b: bytes) -> int:
    """How many tokens two byte strings share from their heads."""
    return common_tokens(a, 0, len(a), b, 0, len(b))
