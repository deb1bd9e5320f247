"""A hold on one path: what it covers is not evicted until it ends.

A lease stands on one block, the last of its path (or the partial one behind it), and covers that block and all
before it. Each node counts what it needs to know of the leases below it, and no more:

    root ─── A (held 1, covered 4 of 4) ─┬─ B (covered 3 of 6) ← a lease that ends at B's third block
                                         └─ C (covered 0)

so a lease on a path of many edges stops walking up at the first edge that is covered already, a lease that moves
forward touches the edges between its two ends, and a split only shares the list of leases out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from radix.blocks import Blocks
from radix.errors import LeaseError
from radix.node import Node, Nodes
from radix.path import Extended, Path
from radix.residence import Residence

if TYPE_CHECKING:
    from radix.tree import RadixTree


class LeaseInfo(NamedTuple):
    """A lease as it is shown: its owner, the tokens it covers, since when (clock, seconds)."""

    owner: str
    tokens: int
    since: float


class Lease:
    """An admitted request's hold. Made by `RadixTree.lease`; ends once, by `release`."""

    __slots__ = ("_tree", "block", "confirmed", "depth", "owner", "path", "reach", "released", "serial",
                 "since")  # fmt: skip

    def __init__(self, tree: RadixTree, serial: int, owner: str, path: Path, since: float) -> None:
        self._tree = tree
        self.serial = serial
        self.owner = owner
        self.path = path
        self.since = since
        self.block = -1  # the block it stands on; -1: nothing is covered yet
        self.reach = -1  # the block below the top tier that it stands on, if it does
        self.depth = 0  # blocks up to and with that one
        self.confirmed = False
        self.released = False

    def confirm(self, *, counted: bool = True) -> None:
        """The request goes on: its path is young, and it is a hit if `counted`. Once."""
        self._check_open()
        if self.confirmed:
            raise LeaseError(f"the lease of {self.owner!r} was confirmed already")
        self._tree.confirm_lease(self, counted)
        self.confirmed = True

    def advance(self, path: Path) -> None:
        """Hold `path` in place of the present one (further, usually); its last block must be there."""
        self._check_open()
        self._tree.move_lease(self, path)

    def extend(self, tokens: bytes, slots: Sequence[int]) -> Extended:
        """`tree.extend` behind this lease's path, and `advance` to what comes of it."""
        self._check_open()
        extended = self._tree.extend(self.path, tokens, slots)
        self._tree.move_lease(self, extended.path)
        return extended

    def release(self) -> None:
        """End the hold; what it covered was used until now. A second call raises LeaseError."""
        self._check_open()
        self._tree.end_lease(self)
        self.released = True

    def _check_open(self) -> None:
        if self.released:
            raise LeaseError(f"the lease of {self.owner!r} was released already")

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.path.reusable_tokens} tokens"
        return f"<Lease of {self.owner!r}: {state}>"


class Holds:
    """The open leases, and what they cover."""

    def __init__(self, blocks: Blocks, nodes: Nodes, residence: Residence) -> None:
        self._blocks = blocks
        self._nodes = nodes
        self._residence = residence
        self._open: dict[int, Lease] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> list[Lease]:
        return list(self._open.values())

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def stand(self, lease: Lease, block: int) -> None:
        """The lease stands on `block` from now on (-1: on the root, where there is nothing to hold).

        The new hold is taken before the old one is let go, so what both cover is never free in between.
        """
        self._open[lease.serial] = lease
        old = self._node_of(lease)
        lease.block = block
        lease.depth = self._blocks.depth[block] + 1 if block >= 0 else 0
        new = self._node_of(lease)
        if new is not None and new is not old:
            new.leases.append(lease)
        if new is not None:
            self._cover(new)
        if old is not None and old is not new:
            old.leases.remove(lease)
            self._cover(old)

    def end(self, lease: Lease) -> None:
        self.stand(lease, -1)
        del self._open[lease.serial]
        self._residence.settle()

    def retreat(self, tail: Node) -> None:
        """A tail is about to go: who stands on it stands on the block before it."""
        before = tail.parent
        assert before is not None
        for lease in list(tail.leases):
            self.stand(lease, int(before.blocks[before.n - 1]) if before.n else -1)

    def _node_of(self, lease: Lease) -> Node | None:
        return self._nodes[self._blocks.node[lease.block]] if lease.block >= 0 else None

    def _cover(self, node: Node | None) -> None:
        """Bring `covered` of a node in line with its leases and children, and so on towards the root."""
        while node is not None:
            if node.held:
                wanted = node.n
            elif node.leases:
                wanted = max(lease.depth for lease in node.leases) - node.start
            else:
                wanted = 0
            before = node.covered
            if wanted == before:
                return
            self._residence.cover(node, wanted)
            parent = node.parent
            if parent is None or (before > 0) == (wanted > 0):
                return
            parent.held += 1 if wanted else -1
            node = parent
