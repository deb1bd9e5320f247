"""The tree against a naive model: a dictionary of all prefixes, in any order of calls.

The model knows nothing of edges, heaps or counts. A block's key is (namespace, all bytes up to its end); a tail's
key ends inside a block. Small alphabets and blocks of two tokens make splits, forks and repeated tails common.
Here: what it answers, and what grows. What leaves is in radix_model_leaving.py, what is asked of lower tiers alone in
radix_model_tiers.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from radix import Adopted, DuplicateOf, Lease, Path, RadixTree, TailKept

Key = tuple[int, bytes]
N_SLOTS = 48


def tok(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def common(a: bytes, b: bytes) -> int:
    n = 0
    while n + 4 <= min(len(a), len(b)) and a[n : n + 4] == b[n : n + 4]:
        n += 4
    return n // 4


@dataclass
class Block:
    id: int
    slots: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    last_use: float = 0.0
    uses: int = 0
    doomed: bool = False
    missed: set[str] = field(default_factory=set)  # tiers that it left, and was not wanted since


@dataclass
class Held:
    lease: Lease
    path: Path
    at: Key  # end of path.blocks
    covers: Key  # end of what it covers: that, or the partial block, or what it reaches
    reaches: bool = False


class Growing(RuleBasedStateMachine):
    block_size = 2
    tiers: tuple[str, ...] = ("hbm",)
    max_ghosts = 10**6

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.tree = RadixTree(
            self.block_size, self.tiers, clock=lambda: self.now, max_ghosts=self.max_ghosts, capacity=4
        )
        self.stride = 4 * self.block_size
        self.spaces = [self.tree.namespace(b"model"), self.tree.namespace(b"model", salt=b"tenant")]
        self.known: dict[Key, Block] = {}
        self.held: list[Held] = []
        self.wanted = dict.fromkeys(self.tiers, 0)
        self.hits_below = dict.fromkeys(self.tiers[1:], 0)
        self.written: dict[Key, int] = {}  # what was persisted, in its order
        self.free = {tier: list(range(N_SLOTS)) for tier in self.tiers}
        self.used = {tier: set[int]() for tier in self.tiers}
        self.furnish()

    def furnish(self) -> None:
        """What is known at the beginning."""

    # -- the model's own answers

    def slot(self, tier: str = "hbm") -> int:
        slot = self.free[tier].pop()
        self.used[tier].add(slot)
        return slot

    def release_slot(self, slot: int, tier: str = "hbm") -> None:
        self.used[tier].remove(slot)
        self.free[tier].append(slot)

    def parent(self, key: Key) -> Key:
        space, run = key
        return space, run[: (len(run) - 1) // self.stride * self.stride]

    def is_tail(self, key: Key) -> bool:
        return len(key[1]) % self.stride != 0

    def below(self, key: Key) -> list[Key]:
        return [k for k in self.known if self.parent(k) == key and k != key]

    def tail_of(self, key: Key) -> Key | None:
        return next((k for k in self.below(key) if self.is_tail(k)), None)

    def is_leased(self, key: Key) -> bool:
        return any(
            h.covers[0] == key[0]
            and (h.covers == key or (not self.is_tail(key) and h.covers[1].startswith(key[1]) and key[1]))
            for h in self.held
        )

    def candidates(self, tier: str) -> dict[Key, tuple[int, float, int]]:
        order = {}
        for key, block in self.known.items():
            if tier not in block.slots or tier in block.leaving or self.is_leased(key):
                continue
            spare = tier == "ram" and "hbm" in block.slots
            if not spare and any(tier in self.known[k].slots for k in self.below(key)):
                continue
            depth = (len(key[1]) - 1) // self.stride
            order[key] = (0 if spare or block.doomed else 1, block.last_use, -depth)
        return order

    def expect(self, space: int, query: bytes) -> tuple[int, int, int, int, int]:
        """n_tokens, known_tokens, partial, evicted, rounded."""
        known = 0
        while (space, query[: known + self.stride]) in self.known and known + self.stride <= len(query):
            known += self.stride
        top = 0
        while top < known and "hbm" in self.known[space, query[: top + self.stride]].slots:
            top += self.stride
        partial = self.agree(space, query, top, "hbm")
        gone = [
            at
            for at in range(top, known, self.stride)
            if not self.known[space, query[: at + self.stride]].slots
        ]
        evicted = self.block_size * len(gone) - (partial if top in gone else 0)
        rounded = self.agree(space, query, known, None) - (partial if known == top else 0)
        return top // 4, known // 4, partial, evicted, rounded

    def agree(self, space: int, query: bytes, at: int, tier: str | None) -> int:
        rest = query[at : at + self.stride]
        return max(
            (
                common(k[1][at:], rest)
                for k in self.below((space, query[:at]))
                if tier is None or tier in self.known[k].slots
            ),
            default=0,
        )

    # -- steps

    space = st.integers(0, 1)
    #: Mostly what is known, cut somewhere and continued somehow: (which, cut in tokens, new tokens).
    ask = st.tuples(st.integers(0, 99), st.integers(0, 20), st.lists(st.integers(0, 2), max_size=5).map(tok))

    def query(self, space: int, ask: tuple[int, int, bytes]) -> bytes:
        which, cut, more = ask
        runs = sorted(run for known_space, run in self.known if known_space == space)
        return (runs[which % len(runs)][: 4 * cut] if runs else b"") + more

    def continuation(self, at: Key, ask: tuple[int, int, bytes]) -> bytes:
        """The same for what follows a place, in whole blocks."""
        which, cut, more = ask
        runs = sorted(run[len(at[1]) :] for space, run in self.known if space == at[0] and run.startswith(at[1]))
        run = (runs[which % len(runs)][: 4 * cut] if runs else b"") + more
        return run[: len(run) // self.stride * self.stride]

    @rule(by=st.integers(0, 2))
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule(space=space, ask=ask, limit=st.none() | st.integers(0, 9))
    def look_up(self, space: int, ask: tuple[int, int, bytes], limit: int | None) -> None:
        self.match(space, self.query(space, ask), limit)

    def match(self, space: int, query: bytes, limit: int | None = None) -> Path:
        path = self.tree.match(self.spaces[space], query, limit)
        if limit is not None:
            query = query[: 4 * limit]
        n, known, partial, evicted, rounded = self.expect(space, query)
        assert path.n_tokens == n
        assert path.n_blocks == len(path.blocks) == n // self.block_size
        assert (path.partial.n_tokens if path.partial else 0) == partial
        assert self.tree.slots(path, "hbm").tolist() == [
            self.known[space, query[:at]].slots["hbm"]
            for at in range(self.stride, 4 * n + 1, self.stride)
        ]
        if path.partial:
            key = self.key_of(path.partial.block)
            assert self.known[key].slots["hbm"] == path.partial.slot
            assert common(key[1][4 * n :], query[4 * n :]) == partial
        assert path.n_tokens + partial + path.evicted_tokens + path.rounded_tokens <= len(query) // 4
        if self.max_ghosts > 1000:
            assert (path.known_tokens, path.evicted_tokens, path.rounded_tokens) == (known, evicted, rounded)
            gone = self.first_gone(space, query, n, known)
            assert (path.ghost is None) == (gone is None or bool(self.known[gone].leaving))
        return path

    def first_gone(self, space: int, query: bytes, n: int, known: int) -> Key | None:
        keys = [(space, query[:at]) for at in range(4 * n + self.stride, 4 * known + 1, self.stride)]
        return next((k for k in keys if not self.known[k].slots), None)

    def key_of(self, block: int) -> Key:
        (key,) = [k for k, b in self.known.items() if b.id == block and (b.slots or b.leaving)]
        return key

    def touch(self, path: Path, at: Key, uses: int) -> None:
        for end in range(self.stride, len(at[1]) + 1, self.stride):
            self.use(self.known[at[0], at[1][:end]], uses)
        if path.partial:
            for block in self.known.values():
                if block.id == path.partial.block and "hbm" in block.slots:
                    self.use(block, uses)

    def use(self, block: Block, uses: int) -> None:
        block.last_use = self.now
        block.uses += uses

    def lies_in(self, block: Block) -> int:
        """The number of the highest tier, or one more than there are."""
        return next((t for t, tier in enumerate(self.tiers) if tier in block.slots), len(self.tiers))

    def want(self, block: Block) -> None:
        """It is read, or computed if it is nowhere: each tier above that let it go should have kept it."""
        for tier in block.missed.intersection(self.tiers[: self.lies_in(block)]):
            self.came_back(tier, block)

    def came_back(self, tier: str, block: Block) -> None:
        self.wanted[tier] += tier in block.missed
        block.missed.discard(tier)

    def left(self, tier: str, block: Block) -> None:
        if tier in block.slots:  # adopted again before this was reported
            self.wanted[tier] += 1
        else:
            block.missed.add(tier)

    def confirmed(self, held: Held, counted: bool) -> None:
        run = held.covers[1]
        below = [
            self.known[held.at[0], run[:end]]
            for end in range(len(held.at[1]) + self.stride, len(run) + 1 if held.reaches else 0, self.stride)
        ]
        for tier in {self.lies_in(block) for block in below} & {*range(1, len(self.tiers))} if counted else ():
            self.hits_below[self.tiers[tier]] += 1
        for block in below:
            self.want(block)
        self.touch(held.lease.path, held.at, int(counted))

    @precondition(lambda self: len(self.held) < 5)
    @rule(space=space, ask=ask, counted=st.sampled_from([True, True, False, None]))
    def take_lease(self, space: int, ask: tuple[int, int, bytes], counted: bool | None) -> None:
        query = self.query(space, ask)
        path = self.match(space, query)
        at = (space, query[: 4 * path.n_tokens])
        covers = self.key_of(path.partial.block) if path.partial else at
        lease = self.tree.lease(path, f"request {len(self.held)}", counted=counted)
        if counted is not None:
            self.touch(path, at, int(counted))
        self.held.append(Held(lease, path, at, covers))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def release_lease(self, which: int) -> None:
        held = self.held.pop(which % len(self.held))
        held.lease.release()
        if held.lease.confirmed:
            self.touch(held.lease.path, held.at, 0)

    @precondition(lambda self: any(not held.lease.confirmed for held in self.held))
    @rule(counted=st.booleans())
    def confirm_lease(self, counted: bool) -> None:
        held = next(held for held in self.held if not held.lease.confirmed)
        held.lease.confirm(counted=counted)
        self.confirmed(held, counted)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), ask=ask, move=st.booleans())
    def extend_leased(self, which: int, ask: tuple[int, int, bytes], move: bool) -> None:
        held = self.held[which % len(self.held)]
        at, path = self.extend(held.lease.path, held.at, self.continuation(held.at, ask))
        if held.reaches and not at[1].startswith(held.covers[1][: len(at[1])]):
            return  # a request goes on to what it reaches
        if move:
            held.lease.advance(path)
            held.path, held.at = path, at
            if len(held.covers[1]) <= len(at[1]) or not held.reaches:
                held.covers, held.reaches = at, False

    @rule(space=space, ask=ask, more=ask)
    def extend_unleased(self, space: int, ask: tuple[int, int, bytes], more: tuple[int, int, bytes]) -> None:
        query = self.query(space, ask)
        path = self.match(space, query)
        at = (space, query[: 4 * path.n_tokens])
        self.extend(path, at, self.continuation(at, more))

    def extend(self, path: Path, at: Key, tokens: bytes) -> tuple[Key, Path]:
        n = len(tokens) // self.stride
        if len(self.free["hbm"]) < n:
            return at, path
        slots = [self.slot() for _ in range(n)]
        expected: list[Adopted | DuplicateOf] = []
        freed = []
        key = at
        for i, slot in enumerate(slots):
            above, key = key, (key[0], key[1] + tokens[i * self.stride : (i + 1) * self.stride])
            freed += self.retire_tail(above, key)
            block = self.known.setdefault(key, Block(-1))
            if "hbm" in block.slots:
                expected.append(DuplicateOf(block.slots["hbm"]))
                self.release_slot(slot)
            else:
                expected.append(Adopted())
                self.want(block)
                block.slots["hbm"] = slot
                if block.id < 0:
                    block.uses = 0
                block.last_use = self.now
        extended = self.tree.extend(path, tokens, slots)
        assert extended.outcomes == expected
        assert sorted(extended.freed_slots) == sorted(freed)
        for slot in freed:
            self.release_slot(slot)
        ids = extended.path.blocks.tolist()
        assert extended.path.n_tokens == len(key[1]) // 4
        for i, block_id in enumerate(ids):
            block = self.known[key[0], key[1][: (i + 1) * self.stride]]
            assert block.id == block_id or block.id < 0 or self.max_ghosts < 1000
            block.id = block_id
        return key, extended.path

    def retire_tail(self, above: Key, child: Key) -> list[int]:
        tail = self.tail_of(above)
        if tail is None or not child[1].startswith(tail[1]):
            return []
        block = self.known[tail]
        if not block.slots and block.leaving:
            return []
        if self.is_leased(tail):
            block.doomed = True
            return []
        del self.known[tail]
        return [block.slots["hbm"]] if block.slots else []

    @precondition(lambda self: self.free["hbm"])
    @rule(space=space, ask=ask, tail=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def set_tail(self, space: int, ask: tuple[int, int, bytes], tail: list[int]) -> None:
        query = self.query(space, ask)
        path = self.match(space, query)
        at = (space, query[: 4 * path.n_tokens])
        tokens = tok(tail[: self.block_size - 1])
        slot = self.slot()
        result = self.tree.set_tail(path, tokens, slot)
        old = self.tail_of(at)
        repeated = any(
            k[1][len(at[1]) :].startswith(tokens) and "hbm" in self.known[k].slots and not self.is_tail(k)
            for k in self.below(at)
        )
        stays = old is not None and (
            self.known[old].slots or self.known[old].leaving
        ) and (
            bool(not self.known[old].slots)
            or len(old[1]) - len(at[1]) >= len(tokens)
            or self.is_leased(old)
        )
        assert isinstance(result, TailKept) == (not repeated and not stays)
        if isinstance(result, TailKept):
            replaced = [*self.known.pop(old).slots.values()] if old is not None else []
            assert result.freed_slots == replaced
            for freed in replaced:
                self.release_slot(freed)
            self.known[space, at[1] + tokens] = Block(result.block, {"hbm": slot}, last_use=self.now)
        else:
            assert result.slot == slot
            self.release_slot(slot)

    @rule(space=space, ask=ask)
    def take_tail(self, space: int, ask: tuple[int, int, bytes]) -> None:
        query = self.query(space, ask)
        path = self.match(space, query)
        slot = self.tree.take_tail(path)
        key = self.key_of(path.partial.block) if path.partial else None
        whole = key is not None and self.is_tail(key) and query.startswith(key[1])
        assert (slot is not None) == (whole and not self.is_leased(key))
        if slot is not None and key is not None:
            assert self.known.pop(key).slots["hbm"] == slot
            self.release_slot(slot)
