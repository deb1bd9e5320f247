"""Partial tails: what stays behind the last whole block of a path, for whoever comes back with the same tokens.

A node owns one at most, in the top tier only. Of two the longer stays; one that a child repeats goes. A tail that
is leased never goes under its holder: if a child comes to repeat it, it is `doomed` and the first victim later.

Whoever wants to append to a tail takes it (then it is nobody else's) or copies its slot. A sole holder may also
have appended to the slot in place: then the slot that it brings is the tail's, and passes on.
"""

from __future__ import annotations

import numpy as np

from radix import lookup
from radix.blocks import Blocks
from radix.edges import Edges
from radix.errors import ResidenceError
from radix.ghosts import Ghosts
from radix.lease import Holds
from radix.node import Node
from radix.path import TailKept, TailNotKept
from radix.residence import TOP, Residence


class Tails:
    """See the module. `freed` lists collect slots that are the caller's to free."""

    def __init__(
        self,
        blocks: Blocks,
        residence: Residence,
        edges: Edges,
        ghosts: Ghosts,
        holds: Holds,
        stride: int,
    ) -> None:
        self._blocks = blocks
        self._residence = residence
        self._edges = edges
        self._ghosts = ghosts
        self._holds = holds
        self._stride = stride
        self.count = 0

    # Before   node [████] ── tail [▓▓▓ ]          ▓ the tree's, in its slot
    # kept     node [████] ── tail [░░░░░ ]        ░ in the caller's slot, now the tree's; ▓'s slot: freed_slots
    # not      node [████] ── tail [▓▓▓ ]          the caller keeps, and frees, its slot
    def set(self, node: Node, at: int, tokens: bytes, slot: int, now: float) -> TailKept | TailNotKept:
        """`tokens` (less than a block) behind block `at` of `node`."""
        old = node.tail if at == node.n else None
        if old is not None and self._slot_of(old) == slot:
            return self._grow(node, old, tokens, slot)
        if lookup.continues(node, at, tokens, self._blocks, self._stride):
            return TailNotKept(slot)
        if old is not None and not self._may_replace(old, tokens):
            return TailNotKept(slot)
        if at < node.n:
            node = self._edges.split(node, at)
        freed: list[int] = []
        self.remove(node, slot, freed)
        tail = self._edges.new_tail(node, tokens, now)
        self._residence.place(TOP, tail, 0, 1, np.array([slot], np.int32))
        self.count += 1
        return TailKept(int(tail.blocks[0]), freed)

    def _grow(self, node: Node, tail: Node, tokens: bytes, slot: int) -> TailKept | TailNotKept:
        """The caller appended in place, to the slot of the tail that is there."""
        if tail.doomed and len(tail.leases) <= 1:
            self.remove(node, slot, [])
            return TailNotKept(slot)
        if tokens.startswith(tail.tokens):
            tail.tokens = tokens
            tail.doomed = lookup.continues(node, node.n, tokens, self._blocks, self._stride)
        elif not tail.tokens.startswith(tokens):
            raise ResidenceError(f"slot {slot} holds a tail of other tokens")
        return TailKept(int(tail.blocks[0]), [])

    def _may_replace(self, tail: Node, tokens: bytes) -> bool:
        if not tail.resident[TOP]:
            return not self._is_leaving(tail)
        return len(tail.tokens) < len(tokens) and not tail.covered

    # Before   node [████]─┬─ tail [▓▓ ]           a child that begins with ▓▓ is placed, in `slot`
    # After    node [████]─── (child [▓▓░░])       ▓'s slot is in `freed`, unless it is `slot`
    # leased   node [████]─┬─ tail [▓▓ ] doomed    until its holder goes; then the first victim
    #                      └─ (child [▓▓░░])
    def retire(self, node: Node, first_block: bytes, slot: int, freed: list[int]) -> None:
        """A child that begins with `first_block` is placed: let the tail go if the child repeats it."""
        tail = node.tail
        if tail is None or not first_block.startswith(tail.tokens) or self._is_leaving(tail):
            return
        if tail.covered and self._slot_of(tail) != slot:
            tail.doomed = True
        else:
            self.remove(node, slot, freed)

    def remove(self, node: Node, slot: int, freed: list[int]) -> None:
        """Forget a node's tail, if it has one; its slot is freed unless it is `slot`, which goes on in use."""
        tail = node.tail
        if tail is None:
            return
        block = int(tail.blocks[0])
        if len(tail.leases) > 1:
            raise ResidenceError(
                f"slot {slot} was appended to while {len(tail.leases)} leases hold it as a tail: copy it"
            )
        self._holds.retreat(tail)
        if tail.resident[TOP]:
            old = self._residence.leave(TOP, block)
            if old != slot:
                freed.append(old)
        self._ghosts.discard(block)
        self._blocks.free(block)
        self._edges.unlink(tail)
        self.count -= 1

    def _slot_of(self, tail: Node) -> int:
        return self._blocks.slot[TOP][int(tail.blocks[0])]

    def _is_leaving(self, tail: Node) -> bool:
        return int(tail.blocks[0]) in self._residence.leaving[TOP]
