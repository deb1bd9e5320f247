"""What the tree's calls return: paths, and the closed sets of outcomes."""

from __future__ import annotations

from typing import NamedTuple

from radix.blocks import IntArray
from radix.ghosts import Ghost


class Namespace(NamedTuple):
    """What may share. Equal fields give equal roots; different namespaces never meet."""

    root: bytes


class Partial(NamedTuple):
    """A block whose first `n_tokens` (1 to block_size - 1) continue a path, in the top tier's `slot`.

    `whole` says that the block is an unnamed tail and holds nothing else than these tokens.
    """

    block: int
    born: int
    slot: int
    n_tokens: int
    whole: bool


class Path(NamedTuple):
    """A known prefix, from the root. Of the `n` tokens that were asked for, in this order:

        n_tokens          in whole blocks, each in the top tier: `blocks`
        partial.n_tokens  more, at the head of one block in the top tier
        evicted_tokens    more that were known and are in no tier; `ghost` says what became of the first
        rounded_tokens    more that agree with the head of a block which is not in the top tier, or which
                          stands behind evicted ones
        the rest          never seen

    With lower tiers, blocks that are there lie between: `known` has all ids, holes among them, and
    `tree.residence(path)` their bits. (`end`, `born`) names the last of `blocks`; -1 at the root.
    """

    namespace: Namespace
    known: IntArray
    n_blocks: int
    n_tokens: int
    known_tokens: int
    end: int
    born: int
    partial: Partial | None = None
    evicted_tokens: int = 0
    rounded_tokens: int = 0
    ghost: Ghost | None = None

    @property
    def blocks(self) -> IntArray:
        """Ids of the whole blocks in the top tier, from the head without a hole."""
        return self.known[: self.n_blocks]

    @property
    def reusable_tokens(self) -> int:
        """Tokens whose KV is in the top tier: whole blocks and the partial one."""
        return self.n_tokens + (self.partial.n_tokens if self.partial else 0)


class Adopted(NamedTuple):
    """The tree holds the block in the caller's slot now."""


class DuplicateOf(NamedTuple):
    """The block was there already, in `slot`: the caller uses that one and frees its own."""

    slot: int


ADOPTED = Adopted()
Outcome = Adopted | DuplicateOf


class Extended(NamedTuple):
    """`path` ends behind the new blocks; one outcome a block, duplicates first.

    `freed_slots` are those of partial tails which the new blocks repeat: the caller frees them.
    """

    path: Path
    outcomes: list[Outcome]
    freed_slots: list[int]

    @property
    def n_adopted(self) -> int:
        return sum(type(outcome) is Adopted for outcome in self.outcomes)


class TailKept(NamedTuple):
    """The tree holds the tail in the caller's slot; `freed_slots`: that of a shorter one it replaces."""

    block: int
    freed_slots: list[int]


class TailNotKept(NamedTuple):
    """The tree had better: the caller frees `slot` (its own)."""

    slot: int


class Victim(NamedTuple):
    """A block that is leaving a tier: its slot, and how many tokens are in it."""

    block: int
    slot: int
    n_tokens: int
