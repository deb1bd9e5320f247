"""Looking up: how far a run of tokens is known, and what continues it in part. Changes nothing.

One `dict` look-up and one `startswith` an edge. Beside the whole blocks there are two ends to look at: where
residence in the top tier ends (its partial block may be reused), and where knowledge ends (what agrees there in
part is rounding).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radix.blocks import Blocks, IntArray
from radix.ghosts import Ghost, Ghosts
from radix.node import TOKEN_BYTES, Node, Nodes, Root, common_head, common_tokens
from radix.path import Namespace, Partial, Path
from radix.residence import TOP

#: Children of a node lie in the order of their tokens, so the one that agrees longest is next to where the
#: query would stand. It may not be in the top tier; this many neighbours a side are asked before giving up.
#: What a node with more dead neighbours than this may cost is less than one block computed again.
NEIGHBOURS = 64

NOTHING: IntArray = np.empty(0, np.int32)


class _Spot(NamedTuple):
    """A place in the tree: behind `at` blocks of `node`, `pos` bytes into the query."""

    node: Node
    at: int
    pos: int


class _Agreeing(NamedTuple):
    """The longest agreement in part: of anything known, and of a block in the top tier (-1: none)."""

    known: int
    top: int
    block: int


def match(
    root: Node, namespace: Namespace, tokens: bytes, end: int, blocks: Blocks, ghosts: Ghosts, stride: int
) -> Path:
    """The longest known prefix of `tokens[:end]`."""
    parts, top, known = _walk(root, tokens, end, stride)
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NOTHING
    n_top = top.pos // stride
    agreeing = _agreeing(top, tokens, end, blocks, stride)
    partial = _partial(agreeing, top.node.tail, blocks) if agreeing.top else None
    evicted, ghost = _evicted(ids[n_top:], blocks, ghosts, stride, agreeing.top)
    if known.pos > top.pos:
        rounded = _agreeing(known, tokens, end, blocks, stride).known
    else:
        rounded = agreeing.known - agreeing.top
    last = int(ids[n_top - 1]) if n_top else -1
    return Path(
        namespace,
        ids,
        n_top,
        top.pos // TOKEN_BYTES,
        known.pos // TOKEN_BYTES,
        last,
        blocks.born[last] if n_top else 0,
        partial,
        evicted,
        rounded,
        ghost,
    )


def _walk(root: Node, tokens: bytes, end: int, stride: int) -> tuple[list[IntArray], _Spot, _Spot]:
    """Ids edge by edge, where the top tier ends, where knowledge ends."""
    parts: list[IntArray] = []
    node, at, pos = root, 0, 0
    top: _Spot | None = None
    while pos + stride <= end and (child := node.children.get(tokens[pos : pos + stride])) is not None:
        if child.slack:
            child.trim(stride)
        above, node, at = node, child, child.n
        if not tokens.startswith(child.tokens, pos, end):
            shared = common_tokens(tokens, pos, end, child.tokens, 0, len(child.tokens))
            at = shared * TOKEN_BYTES // stride
        if top is None and child.resident[TOP] < at:
            there = child.resident[TOP]
            top = _Spot(child, there, pos + there * stride) if there else _Spot(above, above.n, pos)
        parts.append(child.blocks if at == child.n else child.blocks[:at])
        pos += at * stride
        if at < child.n:
            break
    known = _Spot(node, at, pos)
    return parts, top or known, known


def _agreeing(spot: _Spot, tokens: bytes, end: int, blocks: Blocks, stride: int) -> _Agreeing:
    """What continues a place in part: the next block of its edge, or children and tail below its end."""
    query = tokens[spot.pos : min(spot.pos + stride, end)]
    best = _Agreeing(0, 0, -1)
    if not query:
        return best
    for run, block in _continuations(spot, query, stride):
        n = common_head(run, query)
        if n <= best.top:
            continue
        if blocks.resident[block] & (1 << TOP):
            best = _Agreeing(max(n, best.known), n, block)
        elif n > best.known:
            best = best._replace(known=n)
    return best


def _partial(agreeing: _Agreeing, tail: Node | None, blocks: Blocks) -> Partial:
    block = agreeing.block
    is_tail = tail is not None and block == tail.blocks[0]
    whole = tail is not None and is_tail and agreeing.top * TOKEN_BYTES == len(tail.tokens)
    return Partial(block, blocks.born[block], blocks.slot[TOP][block], agreeing.top, whole)


def _continuations(spot: _Spot, query: bytes, stride: int) -> Iterator[tuple[bytes, int]]:
    """Runs of tokens that may agree with the query, and their block. Children: those nearest to it."""
    node, at = spot.node, spot.at
    if at < node.n:
        yield node.tokens[at * stride : (at + 1) * stride], int(node.blocks[at])
        return
    if node.tail is not None:
        yield node.tail.tokens, int(node.tail.blocks[0])
    if not node.keys:
        return
    middle = bisect.bisect_left(node.keys, query)
    for side in (
        range(middle, min(middle + NEIGHBOURS, len(node.keys))),
        range(middle - 1, max(middle - 1 - NEIGHBOURS, -1), -1),
    ):
        for i in side:
            key = node.keys[i]
            if key[:TOKEN_BYTES] != query[:TOKEN_BYTES]:
                break
            child = node.children[key]
            yield key, int(child.blocks[0])
            if child.resident[TOP]:
                break  # further ones agree no longer


def _evicted(
    rest: IntArray, blocks: Blocks, ghosts: Ghosts, stride: int, reused: int
) -> tuple[int, Ghost | None]:
    """Tokens of the known rest that are in no tier, less those that a partial block gives."""
    if not len(rest):
        return 0, None
    gone = rest[blocks.resident_v[rest] == 0]
    if not len(gone):
        return 0, None
    n = len(gone) * (stride // TOKEN_BYTES)
    return n - (reused if gone[0] == rest[0] else 0), ghosts.get(int(gone[0]))


def path_to(block: int, nodes: Nodes, blocks: Blocks, block_size: int) -> Path:
    """From the root to a known block; no tokens are compared."""
    parts: list[IntArray] = []
    node: Node | None = nodes[blocks.node[block]]
    assert node is not None
    upto = blocks.depth[block] + 1 - node.start
    n_top = 0
    while node is not None and node.parent is not None:
        parts.append(node.blocks[:upto])
        there = min(node.resident[TOP], upto)
        n_top = there if there < upto else n_top + there
        node = node.parent
        upto = node.n
    assert isinstance(node, Root)
    ids = np.concatenate(parts[::-1])
    last = int(ids[n_top - 1]) if n_top else -1
    born = blocks.born[last] if n_top else 0
    return Path(Namespace(node.name), ids, n_top, n_top * block_size, len(ids) * block_size, last, born)


def continues(node: Node, at: int, tokens: bytes, blocks: Blocks, stride: int) -> bool:
    """Whether a block in the top tier behind (node, at) begins with `tokens` (less than a block)."""
    if at < node.n:
        run = node.tokens[at * stride : (at + 1) * stride]
        return run.startswith(tokens) and bool(blocks.resident[node.blocks[at]] & (1 << TOP))
    first = bisect.bisect_left(node.keys, tokens)
    for key in node.keys[first : first + NEIGHBOURS]:
        if not key.startswith(tokens):
            return False
        if node.children[key].resident[TOP]:
            return True
    return False
