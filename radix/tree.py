"""The radix tree: which transcripts are known, in which tier each block lies, who holds what.

The caller owns bytes of KV and slots; the tree owns what they mean. A slot passes to the tree when a block is
`adopted` or a tail kept, and back when a call returns it: as `duplicate_of`, in `freed_slots`, as a victim.

    match ──► Path ──► lease ──► extend … extend ──► set_tail ──► release
                                    victims ──► (the caller frees or spills) ──► dropped

A `match` changes nothing and may be repeated; a `lease` is what counts as a use. Rules that hold throughout are
in audit.py. Not safe for several threads: it has one owner, the core's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from radix import audit, lookup
from radix.arrivals import Arrivals
from radix.blocks import Blocks, IntArray
from radix.departures import Departures
from radix.digest import block_digest, root_digest
from radix.edges import Edges
from radix.errors import ArgumentError, ResidenceError
from radix.eviction import Policy, lru
from radix.ghosts import Ghosts
from radix.growth import Growth
from radix.lease import Holds, Lease, LeaseInfo
from radix.node import TOKEN_BYTES, Node, Nodes, Root
from radix.path import Extended, Namespace, Path, TailKept, TailNotKept, Victim
from radix.recover import Record, Recovery, recover
from radix.residence import TOP, Residence
from radix.tails import Tails
from radix.uses import Uses
from radix.wanted import Wanted

#: Between two records of a restart. Steps of less are lost in a clock of 10**9 seconds.
RECOVERED_STEP_S = 1e-6

#: What a million tokens of 16 a block were: about 4 MB of tokens, 2 MB of columns, 6 MB of facts.
MAX_GHOSTS = 65_536


class RadixTree:
    """See the module.

    `tiers` are names from the top (the device's) down. In `spare` tiers, a block that is also in the top tier
    may go, and goes first. `clock` gives seconds and never goes back. Bytes of tokens are int32 little-endian.
    """

    def __init__(
        self,
        block_size: int = 16,
        tiers: Sequence[str] = ("hbm",),
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: Policy = lru,
        max_ghosts: int = MAX_GHOSTS,
        spare: Sequence[str] = ("ram",),
        capacity: int = 1024,
    ) -> None:
        if block_size < 1:
            raise ArgumentError(f"a block of {block_size} tokens: 1 is the least")
        self.block_size = block_size
        self.tiers = tuple(tiers)
        self._stride = block_size * TOKEN_BYTES
        self._clock = clock
        self._began = clock()
        self._blocks = Blocks(len(tiers), capacity)
        self._nodes = Nodes()
        self._roots: dict[bytes, Root] = {}
        self._ghosts = Ghosts(max_ghosts)
        self._residence = Residence(self._blocks, self._nodes, tiers, spare, policy)
        self._edges = Edges(self._blocks, self._nodes, self._residence, self._ghosts, self._stride)
        self._holds = Holds(self._blocks, self._nodes, self._residence)
        self._uses = Uses(self._blocks, self._nodes, self._residence)
        self._tails = Tails(
            self._blocks, self._residence, self._edges, self._ghosts, self._holds, self._stride
        )
        self._wanted = Wanted(self._blocks)
        self._growth = Growth(
            self._blocks, self._residence, self._edges, self._tails, self._ghosts, self._wanted, self._stride, clock
        )
        self._arrivals = Arrivals(
            self._blocks, self._nodes, self._residence, self._tails, self._ghosts, self._wanted, self._stride
        )
        self._departures = Departures(
            self._blocks, self._nodes, self._roots, self._residence, self._edges, self._tails, self._ghosts,
            self._wanted, clock,
        )  # fmt: skip

    # ---------------------------------------------------------------- looking

    def namespace(self, fingerprint: bytes, adapter: bytes = b"", salt: bytes = b"") -> Namespace:
        """The namespace of these fields; the same one for the same fields."""
        return Namespace(root_digest(fingerprint, adapter, salt))

    def match(self, namespace: Namespace, tokens: bytes, limit: int | None = None) -> Path:
        """The longest known prefix of the first `limit` tokens (None: all). Changes nothing."""
        if len(tokens) % TOKEN_BYTES:
            raise ArgumentError(f"{len(tokens)} bytes of tokens: not a multiple of {TOKEN_BYTES}")
        root = self._roots.get(namespace.root)
        if root is None:
            return Path(namespace, lookup.NOTHING, 0, 0, 0, -1, 0)
        end = len(tokens) if limit is None else min(len(tokens), limit * TOKEN_BYTES)
        return lookup.match(root, namespace, tokens, end, self._blocks, self._ghosts, self._stride)

    def slots(self, path: Path, tier: str | None = None) -> IntArray:
        """The slot in `tier` (None: the top one) of each of `path.blocks`; -1 where it is not there."""
        t = TOP if tier is None else self._residence.index(tier)
        taken: IntArray = self._blocks.slot_v[t][path.blocks]
        return taken

    def residence(self, path: Path) -> npt.NDArray[np.uint8]:
        """Of each of `path.known`, a bit for each tier (bit 0: the top one)."""
        bits: npt.NDArray[np.uint8] = self._blocks.resident_v[path.known]
        return bits

    def reach(self, path: Path) -> int:
        """How many of `path.known`, from the head without a hole, are in some tier."""
        rest = self._blocks.resident_v[path.known[path.n_blocks :]]
        holes = np.flatnonzero(rest == 0)
        return path.n_blocks + (int(holes[0]) if len(holes) else len(rest))

    def path_to(self, block: int) -> Path:
        """From the root to a known block: `known` are all ids, holes among them."""
        return lookup.path_to(block, self._nodes, self._blocks, self.block_size)

    # One block, by its id. An id comes back after the block was forgotten; (id, born) names it for good.

    def where(self, block: int) -> int:
        """A bit for each tier that it is in (bit 0: the top one), less those that it is leaving."""
        return self._blocks.resident[block]

    def slot(self, tier: str, block: int) -> int:
        """Its slot in the tier; -1 where it is not there."""
        return self._blocks.slot[self._residence.index(tier)][block]

    def leaving_slot(self, tier: str, block: int) -> int | None:
        """The slot that a victim has until it is reported; None for others."""
        return self._residence.leaving[self._residence.index(tier)].get(block)

    def born(self, block: int) -> int:
        return self._blocks.born[block]

    def is_still(self, block: int, born: int) -> bool:
        """Whether the id still names the block that was born then."""
        return self._blocks.born[block] == born

    def is_leased(self, block: int) -> bool:
        return self._residence.is_leased(block)

    def uses(self, block: int) -> int:
        """How many leases found it."""
        return self._residence.facts(block).uses

    def tokens(self, block: int) -> bytes:
        """Its tokens, int32 little-endian."""
        return self._tokens_of(block)

    def resident(self, tier: str) -> int:
        """Blocks in the tier, without those that are leaving."""
        return self._residence.total[self._residence.index(tier)]

    def leaving(self, tier: str) -> int:
        """Blocks chosen by `victims` and not reported yet; their slots are still in use."""
        return len(self._residence.leaving[self._residence.index(tier)])

    def evictable(self, tier: str) -> int:
        """How many slots repeated `victims` could win now."""
        t = self._residence.index(tier)
        return self._residence.total[t] - self._residence.leased[t]

    def leases(self) -> list[LeaseInfo]:
        """All open leases, oldest first."""
        return [LeaseInfo(x.owner, x.path.reusable_tokens, x.since) for x in self._holds.open()]

    def digest(self, path: Path, i: int) -> bytes:
        """The digest of `path.known[i]` (-1: the root that it stands on). Computed once, with those before it."""
        found, n = None, i
        while n >= 0 and (found := self._blocks.digest(int(path.known[n]))) is None:
            n -= 1
        digest = path.namespace.root if found is None else found
        for block in path.known[n + 1 : i + 1].tolist():
            digest = block_digest(digest, self._tokens_of(block))
            self._blocks.remember_digest(block, digest)
        return digest

    def digests(self, path: Path) -> list[bytes]:
        """The digests of all of `path.known`."""
        return [self.digest(path, i) for i in range(len(path.known))]

    def audit(self, slots_in_use: Mapping[str, set[int]] | None = None) -> list[str]:
        """Every invariant that does not hold, as a sentence. `slots_in_use`: what the other side counts."""
        return audit.check(
            audit.Parts(
                self.block_size, self.tiers, self._blocks, self._nodes, self._roots, self._residence,
                self._ghosts, self._holds, self._tails.count,
            ),
            slots_in_use,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Counts and ages since the start; plain values."""
        return {
            "nodes": self._nodes.live,
            "namespaces": len(self._roots),
            "blocks": self._blocks.in_use,
            "tails": self._tails.count,
            "ghosts": len(self._ghosts),
            "leases": len(self._holds),
            **self._uses.stats(),
            "tiers": {name: self._tier_stats(t) for t, name in enumerate(self.tiers)},
        }

    def _tier_stats(self, t: int) -> dict[str, Any]:
        return {
            "resident": self._residence.total[t],
            "leased": self._residence.leased[t],
            "leaving": len(self._residence.leaving[t]),
            "holes": self._residence.holes[t],
            **self._departures.stats(t),
            "age_at_hit": self._uses.age_at_hit(t),
            "heap": len(self._residence.heaps[t]),
            "heap_pops": self._residence.heaps[t].pops,
        }

    # ---------------------------------------------------------------- using

    def lease(self, path: Path, owner: str, *, counted: bool | None = True, reach: int | None = None) -> Lease:
        """Hold a path, its partial block too. Raises StalePathError.

        With `reach`, it covers so many of `path.known`, whichever tier they are in: none of them leaves any but
        those that are leaving already.

        This is what counts as a use, and makes the path young. With `counted` False it is no hit (a preempted
        request comes back to its own blocks). With None it is neither until `Lease.confirm` (an admission that
        may find no room, and then leaves no trace).
        """
        self._uses.check(path)
        lease = Lease(self, self._holds.next_serial(), owner, path, self._clock())
        if reach is not None and reach > path.n_blocks:
            end = int(path.known[reach - 1])
            self._uses.check_reach(end, reach)
            lease.reach = end
            self._holds.stand(lease, end)
        else:
            self._holds.stand(lease, path.partial.block if path.partial is not None else path.end)
        if counted is not None:
            lease.confirm(counted=counted)
        return lease

    def confirm_lease(self, lease: Lease, counted: bool) -> None:
        """`Lease.confirm`."""
        now = self._clock()
        if counted:
            self._uses.count(lease.path, now)
        if lease.reach >= 0:
            below = lease.path.known[lease.path.n_blocks : self._blocks.depth[lease.reach] + 1]
            self._wanted.read(below)
            if counted:
                self._uses.count_below(below, now)
        self._uses.touch(lease.path, now, 1 if counted else 0)

    def move_lease(self, lease: Lease, path: Path) -> None:
        """`Lease.advance`."""
        self._uses.check(path)
        lease.path = path
        if lease.reach >= 0 and self._blocks.depth[lease.reach] >= path.n_blocks:
            return  # it still holds what is to be reached
        self._stand(lease, path.partial.block if path.partial is not None else path.end)

    def end_lease(self, lease: Lease) -> None:
        """`Lease.release`."""
        if lease.confirmed:
            self._uses.touch(lease.path, self._clock(), 0)
        if lease.reach >= 0:
            self._stand(lease, -1)
        self._holds.end(lease)

    def _stand(self, lease: Lease, block: int) -> None:
        """It reaches no further than the top tier from now on."""
        reach, lease.reach = lease.reach, -1
        self._holds.stand(lease, block)
        if reach >= 0:
            self._departures.uncovered(reach)

    def touch(self, path: Path, reach: int | None = None) -> None:
        """The path is wanted: it is younger from now on, with `reach` so many of its known blocks.
        Raises StalePathError."""
        self._uses.check(path)
        if reach is not None and reach > path.n_blocks:
            end = int(path.known[reach - 1])
            self._uses.check_reach(end, reach)
            path = path._replace(end=end, born=self._blocks.born[end], partial=None)
        self._uses.touch(path, self._clock(), 0)

    def _end_of(self, path: Path) -> tuple[Node, int]:
        """The node in which `path.blocks` end, and how many of them are on it."""
        self._uses.check_end(path)
        if path.end < 0:
            name = path.namespace.root
            root = self._roots.get(name)
            if root is None:
                root = self._roots[name] = Root(name, len(self.tiers))
            return root, 0
        node = self._nodes[self._blocks.node[path.end]]
        return node, self._blocks.depth[path.end] + 1 - node.start

    def _tokens_of(self, block: int) -> bytes:
        node = self._nodes[self._blocks.node[block]]
        at = (self._blocks.depth[block] - node.start) * self._stride
        return node.tokens[at : at + self._stride]

    # ---------------------------------------------------------------- growing

    # Slots of `extend`, block by block; d + r + a = n, any of them may be 0.
    #
    #     path ───────┤ d resident in top │ r known, elsewhere or ghosts │ a never seen ├
    #     outcome       DuplicateOf(slot)   ADOPTED                        ADOPTED
    #     tree's slot   as before           the caller's                   the caller's
    #     caller frees  its own             nothing                        nothing
    #
    # A tail that hangs where r or a begins a child and that the child's tokens repeat goes: its slot is in
    # `freed_slots`, unless it is the very slot that the child was given (its sole holder appended in place).
    # If it is leased it stays until the lease goes, and is then the first victim.
    def extend(self, path: Path, tokens: bytes, slots: Sequence[int] | IntArray) -> Extended:
        """Whole blocks behind `path.blocks`, one slot each. Raises StalePathError if the path's end has gone
        (it can't while leased). Lease what comes back before anything is evicted (`Lease.extend` does both)."""
        n = len(slots)
        if len(tokens) != n * self._stride:
            raise ArgumentError(
                f"{len(tokens) // TOKEN_BYTES} tokens for {n} slots: blocks have {self.block_size} tokens"
            )
        if not n:
            return Extended(self._path_of(path.namespace, path.blocks), [], [])
        node, at = self._end_of(path)
        given: IntArray = np.asarray(slots, np.int32)
        parts, freed = [path.blocks], list[int]()
        outcomes = self._growth.extend(node, at, tokens, given, parts, freed)
        return Extended(self._path_of(path.namespace, np.concatenate(parts)), outcomes, freed)

    def _path_of(self, namespace: Namespace, ids: IntArray) -> Path:
        n_tokens = len(ids) * self.block_size
        last = int(ids[-1]) if len(ids) else -1
        born = self._blocks.born[last] if last >= 0 else 0
        return Path(namespace, ids, len(ids), n_tokens, n_tokens, last, born)

    def set_tail(self, path: Path, tokens: bytes, slot: int) -> TailKept | TailNotKept:
        """1 to block_size - 1 tokens behind `path.blocks`. Not kept where a child in the top tier repeats it,
        where the present tail is as long, or is leased (unless it is the same slot, grown in place)."""
        if not 0 < len(tokens) < self._stride or len(tokens) % TOKEN_BYTES:
            raise ArgumentError(
                f"a tail of {len(tokens) / TOKEN_BYTES:g} tokens: it has 1 to {self.block_size - 1}"
            )
        return self._tails.set(*self._end_of(path), tokens, slot, self._clock())

    def take_tail(self, path: Path) -> int | None:
        """The slot of the tail that is `path.partial`, for the caller to append in: the tree forgets the tail.
        None if the partial is no tail, agrees only in part, or is leased: then copy the slot."""
        partial = path.partial
        if partial is None or not partial.whole:
            return None
        self._uses.check(path)
        tail = self._nodes[self._blocks.node[partial.block]]
        node = tail.parent
        assert node is not None
        if tail.covered or len(tail.tokens) != partial.n_tokens * TOKEN_BYTES:
            return None
        freed: list[int] = []
        self._tails.remove(node, -1, freed)
        self._departures.drop_if_empty(node)
        return freed[0]

    # ---------------------------------------------------------------- moving and forgetting

    #     resident ──victims──► leaving ──dropped──► in a lower tier, or a ghost ──(too many)──► forgotten
    #         ▲                    │                                       │
    #         └───────kept─────────┘◄──────────── extend, placed ──────────┘
    #
    # While it is leaving, a block is in no path's `blocks`, its slot is still in use (the caller may be reading
    # it for a spill) and is the caller's to free once it has reported.
    def victims(self, tier: str, n: int) -> list[Victim]:
        """At most `n` blocks to drop from a tier, in the policy's order: children before parents."""
        chosen = self._residence.choose(self._residence.index(tier), n)
        return [Victim(block, slot, self._n_tokens(block)) for block, slot in chosen]

    def _n_tokens(self, block: int) -> int:
        node = self._nodes[self._blocks.node[block]]
        return len(node.tokens) // TOKEN_BYTES if node.is_tail else self.block_size

    def coming(self, tier: str, n: int) -> list[Victim]:
        """What `victims` would choose now; nothing changes (but how many obsolete entries a heap has)."""
        t = self._residence.index(tier)
        return [Victim(block, slot, self._n_tokens(block)) for block, slot in self._residence.coming(t, n)]

    def value(self, block: int) -> float:
        """What the policy says of the block now: of two, the one with less leaves first."""
        return self._residence.policy(self._residence.facts(block))

    def lost(self, tier: str, blocks: Iterable[int], reason: str) -> None:
        """Copies in a lower tier turned out bad: they are not there any more, whatever lies behind them (which
        leaves a hole). Not for leased blocks. The caller frees the slots."""
        t = self._residence.index(tier)
        if t == TOP:
            raise ResidenceError(f"a block can't be lost from {tier}: computation reads it there")
        self._departures.drop(t, blocks, reason)

    def recover(self, tier: str, records: Iterable[Record]) -> Recovery:
        """What a restart found in a tier: known again. The tree is empty, or knows none of it."""
        return recover(self, self._residence.index(tier), records)

    def before_now(self, steps: int) -> float:
        """A time before this tree began: the more steps, the longer ago."""
        return self._began - RECOVERED_STEP_S * (1 + steps)

    def adopt_found(self, root: bytes, parent: int, t: int, tokens: bytes, slots: IntArray, when: float) -> IntArray:
        """A run of blocks of `recover`, behind a known one (-1: the root), as an edge of its own; their ids."""
        if parent < 0:
            node: Node | None = self._roots.get(root)
            if node is None:
                node = self._roots[root] = Root(root, len(self.tiers))
            if tokens[: self._stride] in node.children:
                raise ResidenceError("the tree knows what is recovered: recover before anything else")
        else:
            node = self._nodes[self._blocks.node[parent]]
            at = self._blocks.depth[parent] + 1 - node.start
            if at < node.n:
                node = self._edges.split(node, at)
        edge = self._edges.branch(node, tokens, len(slots), when)
        self._residence.place(t, edge, 0, edge.n, slots)
        return edge.blocks

    def kept(self, tier: str, blocks: Iterable[int]) -> list[int]:
        """Victims that were not dropped after all are in their slots as before. Parents first. Returns slots
        of tails that they repeat, for the caller to free."""
        return self._arrivals.kept(self._residence.index(tier), blocks)

    def placed(self, tier: str, blocks: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Known blocks are in a tier from now on (a spill or a restore is done). In the top tier, parents
        first. Returns slots of tails that they repeat, for the caller to free."""
        return self._arrivals.placed(self._residence.index(tier), blocks, slots)

    def dropped(self, tier: str, blocks: Iterable[int], reason: str = "space") -> None:
        """Blocks are in `tier` no more: victims, or any that nobody holds and that have no child there (then the
        caller frees their slots). What is in no tier becomes a ghost."""
        self._departures.drop(self._residence.index(tier), blocks, reason)
