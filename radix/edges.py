"""Surgery on edges: grow, split, join, and let go of what nobody remembers.

Tokens and ids move between nodes here; residence, leases and time do not change. Each step leaves every count
that a node keeps (node.py) as the audit would compute it.
"""

from __future__ import annotations

import numpy as np

from radix.blocks import Blocks
from radix.ghosts import Ghosts
from radix.node import NEVER, Node, Nodes, Root
from radix.residence import TOP, Residence

#: An edge shorter than this many blocks grows in place, and joins its only child if both together stay below; so
#: a path that grew block by block has few edges, and no step copies more than 32 KiB of tokens that were there.
#: A turn of +875 tokens in chunks of 512, at 119,000, on two busy cores of an EPYC: 238 µs at 64 blocks, 183 at
#: 128, 144 at 256, 137 at 512, 120 to 156 at 1,024, 132 at 2,048 (by hand; `bench.index` is to measure it again).
GROW_BLOCKS = 512


class Edges:
    """See the module."""

    def __init__(self, blocks: Blocks, nodes: Nodes, residence: Residence, ghosts: Ghosts, stride: int) -> None:
        self._blocks = blocks
        self._nodes = nodes
        self._residence = residence
        self._ghosts = ghosts
        self._stride = stride
        self._n_tiers = blocks.n_tiers

    def flush_uses(self, node: Node) -> None:
        """Write what is pending for all of a node's blocks into their columns."""
        if not node.pending_uses and node.pending_use == NEVER:
            return
        ids = node.blocks[: node.n]
        column = self._blocks.last_use_v
        column[ids] = column[ids].clip(min=node.pending_use)
        self._blocks.uses_v[ids] += node.pending_uses
        node.pending_use, node.pending_uses = NEVER, 0

    # Before   node [████]                      no children, no tail, short
    # After    node [████░░░]                   ░ new ids, resident nowhere yet: the caller places them
    # or
    # Before   node [██████]─┬─ x               anything else
    # After    node [██████]─┼─ x
    #                        └─ child [░░░]
    def grow(self, node: Node, tokens: bytes, n: int, now: float) -> tuple[Node, int]:
        """`n` new blocks behind a node's end; returns the node that owns them and its first new index."""
        appendable = (
            0 < node.n < GROW_BLOCKS and not node.children and node.tail is None and not node.is_tail
        )
        if not appendable:
            return self.branch(node, tokens, n, now), 0
        self.flush_uses(node)
        if node.slack:
            node.trim(self._stride)
        first = node.n
        ids = self._blocks.allocate(n, node.id, node.end, now)
        node.tokens += tokens
        node.blocks = np.concatenate((node.blocks, ids))
        node.n += n
        return node, first

    def branch(self, parent: Node, tokens: bytes, n: int, now: float) -> Node:
        """The same as an edge of its own, whatever is there."""
        id = self._nodes.reserve()
        ids = self._blocks.allocate(n, id, parent.end, now)
        child = Node(id, parent, parent.end, tokens, ids, self._n_tiers)
        self._nodes.add(child)
        parent.attach(child, self._stride)
        return child

    def new_tail(self, parent: Node, tokens: bytes, now: float) -> Node:
        """A tail below a node that has none; resident nowhere yet."""
        assert parent.tail is None
        id = self._nodes.reserve()
        ids = self._blocks.allocate(1, id, parent.end, now)
        tail = Node(id, parent, parent.end, tokens, ids, self._n_tiers)
        tail.is_tail = True
        self._nodes.add(tail)
        parent.tail = tail
        return tail

    # Before   parent ── node [aaaaaabbbb]─┬─ x          leases: one ends in a, one in b
    #                                      └─ (tail)
    # After    parent ── upper [aaaaaa] ── node [bbbb]─┬─ x
    #                    (the first)       (the second)└─ (tail)
    #
    # No id changes hands: the upper part's blocks only get another `node`. The old object keeps the end, so
    # children and whoever ends there need not be told.
    def split(self, node: Node, at: int) -> Node:
        """Cut an edge before its block number `at` (0 < at < n); returns the new upper part."""
        assert 0 < at < node.n, f"split of {node.n} blocks at {at}"
        parent = node.parent
        assert parent is not None
        if node.slack:
            node.trim(self._stride)
        cut = at * self._stride
        upper = Node(
            self._nodes.reserve(), parent, node.start, node.tokens[:cut], node.blocks[:at].copy(), self._n_tiers
        )
        self._nodes.add(upper)
        self._blocks.node_v[upper.blocks] = upper.id
        parent.children[node.tokens[: self._stride]] = upper
        node.parent, node.start, node.n = upper, node.start + at, node.n - at
        node.tokens, node.blocks = node.tokens[cut:], node.blocks[at:].copy()
        upper.attach(node, self._stride)
        upper.pending_use, upper.pending_uses = node.pending_use, node.pending_uses
        self._share_counts(upper, node)
        return upper

    def _share_counts(self, upper: Node, lower: Node) -> None:
        for tier in range(self._n_tiers):
            total = lower.resident[tier]
            mine = min(total, upper.n) if tier == TOP else self._blocks.count(upper.blocks, tier)
            upper.resident[tier], lower.resident[tier] = mine, total - mine
            upper.kids[tier] = self._blocks.resident[lower.blocks[0]] >> tier & 1
        upper.covered, lower.covered = min(lower.covered, upper.n), max(0, lower.covered - upper.n)
        upper.held = 1 if lower.covered else 0
        upper.leases = [lease for lease in lower.leases if lease.depth <= upper.end]
        lower.leases = [lease for lease in lower.leases if lease.depth > upper.end]

    # Before   parent ── upper [aaa] ── node [bbbb]─┬─ x      upper: no tail, no other child
    # After    parent ── node [aaabbbb]─┬─ x                  upper is gone
    def join(self, upper: Node) -> None:
        """Undo a split whose reason is gone, where both parts are short."""
        if upper.parent is None or upper.tail is not None or len(upper.children) != 1:
            return
        (node,) = upper.children.values()
        if upper.n + node.n > GROW_BLOCKS:
            return
        for part in (upper, node):
            self.flush_uses(part)
            if part.slack:
                part.trim(self._stride)
        self._blocks.node_v[upper.blocks] = node.id
        upper.parent.children[upper.tokens[: self._stride]] = node
        node.covered = upper.n + node.covered if node.covered else upper.covered
        node.leases = upper.leases + node.leases
        node.resident = [a + b for a, b in zip(upper.resident, node.resident, strict=True)]
        node.tokens, node.blocks = upper.tokens + node.tokens, np.concatenate((upper.blocks, node.blocks))
        node.parent, node.start, node.n = upper.parent, upper.start, upper.n + node.n
        self._nodes.discard(upper)

    # Before   a [██▒▒] ── b [▒▒▒]       █ in some tier   ▒ in none, and no ghost any more
    # After    a [██]                    ids of ▒ are free; tokens are cut when a is next read
    def prune(self, block: int) -> Root | None:
        """Forget a block that nothing remembers, and those before it that only it kept. Nothing happens while
        something known lies behind it, or a lease covers it. Returns a root that is empty now, if one is."""
        node = self._nodes[self._blocks.node[block]]
        while not node.children and node.tail is None:
            while node.n > node.covered and self._is_forgotten(int(node.blocks[node.n - 1])):
                node.n -= 1
                node.slack = True
                self._blocks.free(int(node.blocks[node.n]))
            parent = node.parent
            if isinstance(node, Root):
                return node
            assert parent is not None
            if node.n:
                if len(node.blocks) > 2 * node.n + 64:
                    node.trim(self._stride)
                return None
            self.unlink(node)
            node = parent
        self.join(node)
        return None

    def unlink(self, node: Node) -> None:
        """Take a node whose blocks are all forgotten out of the tree."""
        parent = node.parent
        assert parent is not None
        if node.is_tail:
            parent.tail = None
        else:
            parent.detach(node, self._stride)
        self._nodes.discard(node)

    def _is_forgotten(self, block: int) -> bool:
        return block not in self._ghosts and not self._residence.is_anywhere(block)
