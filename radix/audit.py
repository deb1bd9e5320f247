"""Every invariant of the tree, computed again from scratch; what does not hold comes back as sentences.

Structure   An edge has at least one block; its tokens are its blocks'; a child begins where its parent ends, and
            lies under its first block's tokens; siblings differ in their first block. A tail is shorter than a
            block, has no children and lives in the top tier. Each id belongs to one edge or is free.
Residence   The top tier is prefix-closed. A slot is in one block's hands. Counts in nodes and totals are sums.
            Holes below are counted, they are no fault. An edge ends in something that is remembered, or is
            under a lease. A block that is in a tier is not missed there.
Leases      Covered is what leases cover, no more ("leased that nobody owns") and no less; all of it that a lease
            stands on is in the top tier.
Heaps       Each candidate has an entry, no later in the order than the candidate is now.
Tails       No child in the top tier repeats an unleased one.
Digests     Those remembered are right.
The other   Slots in use, as the tiers count them, are those of resident and leaving blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from radix.blocks import Blocks
from radix.digest import block_digest
from radix.ghosts import Ghosts
from radix.lease import Holds, Lease
from radix.node import TOKEN_BYTES, Node, Nodes, Root
from radix.residence import TOP, Residence


class Parts(NamedTuple):
    """What there is to look at."""

    block_size: int
    tiers: tuple[str, ...]
    blocks: Blocks
    nodes: Nodes
    roots: dict[bytes, Root]
    residence: Residence
    ghosts: Ghosts
    holds: Holds
    n_tails: int


def check(parts: Parts, slots_in_use: Mapping[str, set[int]] | None = None) -> list[str]:
    """All violations; an empty list is a healthy tree. Takes time in proportion to the tree."""
    return [
        violation
        for part in (_structure, _ids, _residence, _totals, _leases, _heaps, _tails, _digests)
        for violation in part(parts)
    ] + list(_other_side(parts, slots_in_use or {}))


def _all_nodes(parts: Parts) -> Iterator[Node]:
    """Roots too; parents before children."""
    stack: list[Node] = list(parts.roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
        if node.tail is not None:
            stack.append(node.tail)


def _edges(parts: Parts) -> Iterator[Node]:
    return (node for node in _all_nodes(parts) if node.parent is not None)


def _known(node: Node) -> list[int]:
    ids: list[int] = node.blocks[: node.n].tolist()
    return ids


def _name(node: Node) -> str:
    kind = "tail" if node.is_tail else "root" if node.parent is None else "edge"
    return f"{kind} {node.id} (blocks {node.start} to {node.end})"


def _structure(parts: Parts) -> Iterator[str]:
    stride = parts.block_size * TOKEN_BYTES
    for node in _all_nodes(parts):
        if sorted(node.children) != node.keys:
            yield f"{_name(node)}: its keys in order are not its children's"
        for key, child in node.children.items():
            if child.parent is not node or child.start != node.end:
                yield f"{_name(child)} does not begin where its parent {_name(node)} ends"
            if child.tokens[:stride] != key:
                yield f"{_name(child)} lies under other tokens than its own"
        if node.tail is not None:
            yield from _tail_structure(node, node.tail, stride)
        if node.parent is None:
            if not node.children and node.tail is None:
                yield f"{_name(node)} is empty"
            continue
        if parts.nodes[node.id] is not node:
            yield f"{_name(node)} is not what the table has under its id"
        if not node.is_tail:
            wrong_size = len(node.tokens) != len(node.blocks) * stride or len(node.blocks) < node.n
            if node.n < 1 or wrong_size or (not node.slack and len(node.blocks) != node.n):
                yield f"{_name(node)}: {len(node.tokens)} bytes, {len(node.blocks)} ids, {node.n} blocks"


def _tail_structure(node: Node, tail: Node, stride: int) -> Iterator[str]:
    if tail.parent is not node or tail.start != node.end or not tail.is_tail:
        yield f"{_name(tail)} does not hang at the end of {_name(node)}"
    if not 0 < len(tail.tokens) < stride or tail.n != 1 or tail.children or tail.tail is not None:
        yield f"{_name(tail)} has {len(tail.tokens)} bytes, {tail.n} blocks"
    if any(tail.resident[1:]):
        yield f"{_name(tail)} is in a lower tier"


def _ids(parts: Parts) -> Iterator[str]:
    blocks = parts.blocks
    owner: dict[int, Node] = {}
    for node in _edges(parts):
        for i, block in enumerate(_known(node)):
            if block in owner:
                yield f"block {block} is on {_name(owner[block])} and on {_name(node)}"
            owner[block] = node
            if blocks.node[block] != node.id or blocks.depth[block] != node.start + i:
                yield f"block {block} of {_name(node)}: column says node {blocks.node[block]}"
    free = blocks.free_ids().tolist()
    if len(set(free)) != len(free) or set(free) & set(owner) or len(free) + len(owner) != blocks.high:
        yield f"{blocks.high} ids, but {len(owner)} on edges and {len(free)} free"
    if sum(1 for _ in _edges(parts)) != parts.nodes.live:
        yield f"{parts.nodes.live} nodes in the table, not as many in the tree"
    for block in parts.ghosts.blocks():
        if block not in owner or parts.residence.is_anywhere(block):
            yield f"ghost {block} is no known block, or is in a tier"
    if len(parts.ghosts) > parts.ghosts.limit:
        yield f"{len(parts.ghosts)} ghosts, {parts.ghosts.limit} are the most"


def _residence(parts: Parts) -> Iterator[str]:
    blocks = parts.blocks
    for node in _edges(parts):
        ids = _known(node)
        for t, tier in enumerate(parts.tiers):
            there = [bool(blocks.resident[block] >> t & 1) for block in ids]
            if sum(there) != node.resident[t]:
                yield f"{_name(node)}: {sum(there)} blocks in {tier}, it counts {node.resident[t]}"
            if any(yes and blocks.missed[b] >> t & 1 for yes, b in zip(there, ids, strict=True)):
                yield f"{_name(node)}: a block is in {tier}, and missed there"
            if any(yes != (blocks.slot[t][b] >= 0) for yes, b in zip(there, ids, strict=True)):
                yield f"{_name(node)}: a block has a slot in {tier} and is not there, or the other way round"
            if t == TOP:
                parent = node.parent
                assert parent is not None
                if sorted(there, reverse=True) != there or (there[0] and parent.resident[t] != parent.n):
                    yield f"{_name(node)}: {tier} is not prefix-closed"
        if not node.children and node.tail is None:
            last = ids[-1]
            known = last in parts.ghosts or parts.residence.is_anywhere(last) or parts.residence.is_leased(last)
            if not known:
                yield f"{_name(node)} ends in block {last}, which nothing remembers"
    for node in _all_nodes(parts):
        below = [*node.children.values()] + ([node.tail] if node.tail is not None else [])
        for t, tier in enumerate(parts.tiers):
            kids = sum(blocks.resident[child.blocks[0]] >> t & 1 for child in below)
            if kids != node.kids[t]:
                yield f"{_name(node)}: {kids} children begin in {tier}, it counts {node.kids[t]}"


def _totals(parts: Parts) -> Iterator[str]:
    residence = parts.residence
    for t, tier in enumerate(parts.tiers):
        ids = [b for node in _edges(parts) for b in _known(node) if parts.blocks.resident[b] >> t & 1]
        leased = sum(residence.is_leased(block) for block in ids)
        if (len(ids), leased) != (residence.total[t], residence.leased[t]):
            yield (
                f"{tier}: {len(ids)} blocks and {leased} leased, "
                f"it counts {residence.total[t]} and {residence.leased[t]}"
            )
        holes = sum(_is_hole(parts, t, node, i) for node in _edges(parts) for i in range(node.n))
        if residence.counts_holes[t] and holes != residence.holes[t]:
            yield f"{tier}: {holes} holes, it counts {residence.holes[t]}"
        slots = [parts.blocks.slot[t][block] for block in ids] + [*residence.leaving[t].values()]
        if len(set(slots)) != len(slots):
            yield f"{tier}: a slot is in the hands of two blocks"


def _is_hole(parts: Parts, t: int, node: Node, i: int) -> bool:
    bits = parts.blocks.resident
    behind = [node.blocks[i + 1]] if i + 1 < node.n else [child.blocks[0] for child in node.children.values()]
    return not bits[node.blocks[i]] >> t & 1 and any(bits[block] >> t & 1 for block in behind)


def _leases(parts: Parts) -> Iterator[str]:
    ending: dict[int, list[Lease]] = {}
    for lease in parts.holds.open():
        if lease.block < 0:
            continue
        if lease.reach < 0 and not parts.blocks.resident[lease.block] & (1 << TOP):
            yield f"{lease!r} stands on block {lease.block}, which is not in {parts.tiers[TOP]}"
        if parts.blocks.depth[lease.block] + 1 != lease.depth:
            yield f"{lease!r} has depth {lease.depth}, its block another"
        ending.setdefault(parts.blocks.node[lease.block], []).append(lease)
    covered: dict[int, int] = {}
    for node in reversed(list(_all_nodes(parts))):
        mine = ending.get(node.id, [])
        if {id(lease) for lease in mine} != {id(lease) for lease in node.leases}:
            yield f"{_name(node)}: its leases are not those that end there"
        below = [*node.children.values()] + ([node.tail] if node.tail is not None else [])
        held = sum(covered[id(child)] > 0 for child in below)
        covers = node.n if held else max((lease.depth - node.start for lease in mine), default=0)
        covered[id(node)] = covers
        if (held, covers) != (node.held, node.covered):
            yield (
                f"{_name(node)}: leases cover {covers} blocks and {held} children, "
                f"it counts {node.covered} and {node.held}"
            )


def _heaps(parts: Parts) -> Iterator[str]:
    for t, tier in enumerate(parts.tiers):
        entries = parts.residence.heaps[t].entries()
        for node in _edges(parts):
            for block in _known(node):
                if not parts.residence.is_candidate(t, block):
                    continue
                if block not in entries:
                    yield f"block {block} could leave {tier} and is not in its heap"
                elif entries[block] > parts.residence.key(t, block):
                    yield f"block {block} would leave {tier} too late"


def _tails(parts: Parts) -> Iterator[str]:
    tails = [node for node in _edges(parts) if node.is_tail]
    if len(tails) != parts.n_tails:
        yield f"{len(tails)} tails, the tree counts {parts.n_tails}"
    for tail in tails:
        assert tail.parent is not None
        repeated = any(
            key.startswith(tail.tokens) and child.resident[TOP] for key, child in tail.parent.children.items()
        )
        if repeated and tail.resident[TOP] and not tail.doomed:
            yield f"{_name(tail)} repeats a child's head"


def _digests(parts: Parts) -> Iterator[str]:
    stride = parts.block_size * TOKEN_BYTES
    for name, root in parts.roots.items():
        stack: list[tuple[Node, bytes | None]] = [(root, name)]
        while stack:
            node, parent = stack.pop()
            for i, block in enumerate(_known(node) if not node.is_tail else []):
                found = parts.blocks.digest(block)
                tokens = node.tokens[i * stride : (i + 1) * stride]
                if found is not None and (parent is None or found != block_digest(parent, tokens)):
                    yield f"block {block} of {_name(node)} has a wrong digest"
                parent = found
            stack.extend((child, parent) for child in node.children.values())


def _other_side(parts: Parts, slots_in_use: Mapping[str, set[int]]) -> Iterator[str]:
    for tier, theirs in slots_in_use.items():
        t = parts.residence.index(tier)
        ours = {
            parts.blocks.slot[t][block]
            for node in _edges(parts)
            for block in _known(node)
            if parts.blocks.resident[block] >> t & 1
        } | set(parts.residence.leaving[t].values())
        if ours - theirs:
            yield f"{tier}: the tree holds slots that are free there: {sorted(ours - theirs)[:8]}"
        if theirs - ours:
            yield f"{tier}: slots are in use that the tree does not hold: {sorted(theirs - ours)[:8]}"
