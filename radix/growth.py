"""How a path grows by whole blocks: what the tree has already, what it takes back, what it has never seen."""

from __future__ import annotations

from collections.abc import Callable

from radix.blocks import Blocks, IntArray
from radix.edges import Edges
from radix.ghosts import Ghosts
from radix.node import TOKEN_BYTES, Node, common_tokens
from radix.path import ADOPTED, DuplicateOf, Outcome
from radix.residence import TOP, Residence
from radix.tails import Tails
from radix.wanted import Wanted


class Growth:
    """See the module. `freed` lists collect slots that are the caller's to free."""

    def __init__(
        self,
        blocks: Blocks,
        residence: Residence,
        edges: Edges,
        tails: Tails,
        ghosts: Ghosts,
        wanted: Wanted,
        stride: int,
        clock: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._residence = residence
        self._edges = edges
        self._tails = tails
        self._ghosts = ghosts
        self._wanted = wanted
        self._stride = stride
        self._clock = clock

    def extend(
        self, node: Node, at: int, tokens: bytes, given: IntArray, parts: list[IntArray], freed: list[int]
    ) -> list[Outcome]:
        """`tokens` behind block `at` of `node`, in slots `given`; their ids go to `parts`."""
        stride, n = self._stride, len(given)
        outcomes: list[Outcome] = []
        done = 0
        while done < n:
            if at == node.n:
                child = node.children.get(tokens[done * stride : (done + 1) * stride])
                if child is None:
                    break
                node, at = child, 0
            if node.slack:
                node.trim(stride)
            shared = common_tokens(tokens, done * stride, len(tokens), node.tokens, at * stride, len(node.tokens))
            k = shared * TOKEN_BYTES // stride
            if not k:
                break
            outcomes += self._adopt_known(node, at, at + k, given[done : done + k], freed)
            parts.append(node.blocks[at : at + k])
            at, done = at + k, done + k
        if done < n:
            parts.append(self._adopt_new(node, at, tokens[done * stride :], given[done:], freed))
            outcomes += [ADOPTED] * (n - done)
        return outcomes

    def _adopt_known(
        self, node: Node, first: int, last: int, given: IntArray, freed: list[int]
    ) -> list[Outcome]:
        """Blocks that the tree has: duplicates as far as the top tier reaches, the rest adopted again."""
        middle = min(max(node.resident[TOP], first), last)
        there = self._blocks.slot_v[TOP][node.blocks[first:middle]]
        outcomes: list[Outcome] = [
            ADOPTED if mine == slot else DuplicateOf(slot)
            for slot, mine in zip(there.tolist(), given.tolist(), strict=False)
        ]
        if first == 0 and node.parent is not None:
            self._tails.retire(node.parent, node.tokens[: self._stride], int(given[0]), freed)
        if middle < last:
            ids = node.blocks[middle:last]
            self._wanted.read(ids)
            for block in ids.tolist():
                self._ghosts.discard(block)
            self._blocks.last_use_v[ids] = self._clock()
            self._residence.place(TOP, node, middle, last, given[middle - first :])
            outcomes += [ADOPTED] * (last - middle)
        return outcomes

    def _adopt_new(self, node: Node, at: int, tokens: bytes, given: IntArray, freed: list[int]) -> IntArray:
        """Blocks that nobody has seen: behind a cut, if it is inside an edge."""
        if at < node.n:
            node = self._edges.split(node, at)
        self._tails.retire(node, tokens[: self._stride], int(given[0]), freed)
        owner, first = self._edges.grow(node, tokens, len(given), self._clock())
        self._residence.place(TOP, owner, first, owner.n, given)
        return owner.blocks[first:]
