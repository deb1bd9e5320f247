"""The model over three tiers: leases that reach below HBM, records that go bad, and restarts."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from radix_model import Block, Held, Key, tok
from radix_model_leaving import Model

from radix import Path, RadixTree, Record, ResidenceError, block_digest

#: From here on, slots that no tier of the model has.
N_EXTRA = 1000


class LowerTiers(Model):
    tiers = ("hbm", "ram", "nvme")

    def furnish(self) -> None:
        """A fork of which most is in lower tiers, and was let go of higher up."""
        for run in ([0] * 8, [0] * 4 + [1] * 4, [2] * 4):
            path = self.match(0, tok(run))
            at = (0, tok(run)[: 4 * path.n_tokens])
            self.extend(path, at, tok(run)[len(at[1]) :])
        for key in sorted(self.known, key=lambda k: (len(k[1]), k)):
            for tier in ("ram", "nvme"):
                if tier == "nvme" or len(key[1]) % (2 * self.stride):
                    self.place_below(tier, key)
        for tier, n in (("hbm", 7), ("ram", 2)):
            for key in self.choose(tier, n):
                self.report(tier, key)

    # -- to NVMe

    @precondition(lambda self: self.free["nvme"])
    @rule(which=st.integers(0, 99), parents_first=st.booleans())
    def persist(self, which: int, parents_first: bool) -> None:
        there = [
            k
            for k, b in self.known.items()
            if (b.slots or b.leaving)
            and not {"nvme"} & (b.slots.keys() | b.leaving.keys())
            and not self.is_tail(k)
            and (not parents_first or not self.parent(k)[1] or "nvme" in self.known[self.parent(k)].slots)
        ]
        if there:
            self.place_below("nvme", there[which % len(there)])

    @rule(n=st.integers(1, 9), tiers=st.sets(st.sampled_from(["ram", "nvme"])))
    def spill_what_leaves(self, n: int, tiers: set[str]) -> None:
        """As a cache does it: HBM's victims are copied down before they are reported."""
        for key in self.choose("hbm", n):
            block = self.known[key]
            for tier in sorted(tiers) if not self.is_tail(key) else ():
                if self.free[tier] and tier not in block.slots and tier not in block.leaving:
                    self.place_below(tier, key)
            self.report("hbm", key)

    def place_below(self, tier: str, key: Key) -> None:
        block = self.known[key]
        self.came_back(tier, block)
        block.slots[tier] = self.slot(tier)
        if tier == "nvme":
            self.written[key] = max(self.written.values(), default=0) + 1
        self.tree.placed(tier, [block.id], [block.slots[tier]])

    @rule(which=st.integers(0, 99), tier=st.sampled_from(["ram", "nvme"]))
    def lose(self, which: int, tier: str) -> None:
        """A copy is bad: gone, whatever lies behind it, unless somebody holds it."""
        there = [k for k, b in self.known.items() if tier in b.slots]
        if not there:
            return
        key = there[which % len(there)]
        block = self.known[key]
        if self.is_leased(key):
            with pytest.raises(ResidenceError, match="leased"):
                self.tree.lost(tier, [block.id], "bad")
            return
        self.release_slot(block.slots.pop(tier), tier)
        self.left(tier, block)
        self.tree.lost(tier, [block.id], "bad")

    # -- reaching below HBM

    def found(self, space: int, ask: tuple[int, int, bytes]) -> tuple[Path, Key, list[Key]]:
        """A match, where its part in HBM ends, and the ends of blocks behind that which are there without a hole."""
        which, _, more = ask
        below = sorted(r for (s, r), b in self.known.items() if s == space and b.slots and "hbm" not in b.slots)
        query = below[which % len(below)] + more if below else self.query(space, ask)
        path = self.match(space, query)._replace(partial=None)
        reached = []
        end = 4 * path.n_tokens + self.stride
        while end <= len(query) and (block := self.known.get((space, query[:end]))) and block.slots:
            reached.append((space, query[:end]))
            end += self.stride
        assert self.tree.reach(path) == path.n_blocks + len(reached)
        return path, (space, query[: 4 * path.n_tokens]), reached

    @precondition(lambda self: len(self.held) < 5)
    @rule(space=Model.space, ask=Model.ask, n=st.integers(0, 9), counted=st.sampled_from([True, True, False, None]))
    def take_lease_that_reaches(
        self, space: int, ask: tuple[int, int, bytes], n: int, counted: bool | None
    ) -> None:
        path, at, reached = self.found(space, ask)
        while len(reached) + path.n_blocks < len(path.known):  # what is being persisted may be leaving meanwhile
            block = int(path.known[path.n_blocks + len(reached)])
            if self.tree.leaving_slot("hbm", block) is None:
                break
            run = next(k for k, b in self.known.items() if b.id == block and "hbm" in b.leaving)
            reached.append(run)
        if not reached:
            return
        n %= len(reached)
        lease = self.tree.lease(path, "reaches", counted=counted, reach=path.n_blocks + n + 1)
        held = Held(lease, path, at, reached[n], reaches=True)
        self.held.append(held)
        if counted is not None:
            self.confirmed(held, counted)

    @rule(space=Model.space, ask=Model.ask, n=st.none() | st.integers(0, 9))
    def touch_path(self, space: int, ask: tuple[int, int, bytes], n: int | None) -> None:
        path, at, reached = self.found(space, ask)
        if n is None or not reached:
            self.tree.touch(path)
            self.touch(path, at, 0)
        else:
            n %= len(reached)
            self.tree.touch(path, reach=path.n_blocks + n + 1)
            self.touch(path, reached[n], 0)

    # -- a restart

    def records(self) -> dict[Key, Record]:
        names: dict[Key, bytes] = {}
        for key in sorted(self.known, key=lambda k: len(k[1])):
            above = self.parent(key)
            root = self.spaces[key[0]].root
            names[key] = block_digest(names.get(above, root), key[1][len(above[1]) :])
        return {
            k: Record(
                self.spaces[k[0]].root, names[k], names.get(self.parent(k), self.spaces[k[0]].root),
                len(k[1]) // self.stride - 1, k[1][-self.stride :], b.slots["nvme"], self.written[k],
            )
            for k, b in self.known.items()
            if "nvme" in b.slots
        }  # fmt: skip

    @precondition(lambda self: any("nvme" in b.slots for b in self.known.values()))
    @rule(
        which=st.integers(0, 99),
        likely=st.integers(0, 3),
        seed=st.integers(0, 9),
        faults=st.sets(st.sampled_from(["older copy", "digest", "root", "depth", "length"])),
    )
    def restart(self, which: int, likely: int, seed: int, faults: set[str]) -> None:
        if likely:
            return  # most runs are to get somewhere first
        records = self.records()
        before = {k: self.on_nvme(k) for k in self.known}
        whole = {k for k in records if before[k] == len(k[1]) // self.stride}
        good = [*records.values()]
        one = good[which % len(good)]
        spare = iter(range(N_EXTRA, 2 * N_EXTRA))
        extra = {
            "older copy": one._replace(slot=next(spare), order=0),
            "digest": one._replace(slot=next(spare), digest=b"x" * 16, order=10**6),
            "root": one._replace(slot=next(spare), root=b"y" * 16, order=10**6),
            "depth": one._replace(slot=next(spare), depth=one.depth + 1, order=10**6),
            "length": one._replace(slot=next(spare), tokens=one.tokens[4:], order=10**6),
        }
        found = good + [extra[fault] for fault in sorted(faults)]
        random.Random(seed).shuffle(found)
        self.tree = RadixTree(
            self.block_size, self.tiers, clock=lambda: self.now, max_ghosts=self.max_ghosts, capacity=4
        )
        recovery = self.tree.recover("nvme", found)
        lost = [records[k].slot for k in records if k not in whole]
        assert recovery.blocks == len(whole)
        assert sorted(recovery.orphans) == sorted(lost + [extra[f].slot for f in faults - {"older copy"}])
        assert recovery.duplicates == [extra[f].slot for f in faults & {"older copy"}]
        self.begin_again(whole)
        assert {k: self.on_nvme(k) for k in before} == before

    def on_nvme(self, key: Key) -> int:
        """The leading run of a key's blocks that is there, and in the right slots."""
        path = self.tree.match(self.spaces[key[0]], key[1])
        n = 0
        for block in path.known.tolist():
            slot = self.tree.slot("nvme", block)
            if slot < 0:
                break
            n += 1
            assert self.known[key[0], key[1][: n * self.stride]].slots["nvme"] == slot
        return n

    def begin_again(self, whole: set[Key]) -> None:
        """The model of what a restart leaves."""
        old, self.known = self.known, {}
        for key in whole:
            block = int(self.tree.match(self.spaces[key[0]], key[1]).known[-1])
            facts = self.tree._residence.facts(block)
            assert facts.last_use < self.now
            self.known[key] = Block(block, {"nvme": old[key].slots["nvme"]}, last_use=facts.last_use)
        self.held = []
        self.wanted = dict.fromkeys(self.tiers, 0)
        self.hits_below = dict.fromkeys(self.tiers[1:], 0)
        for tier in self.tiers:
            used = {b.slots[tier] for b in self.known.values() if tier in b.slots}
            self.free[tier] = sorted({*self.free[tier], *self.used[tier]} - used)
            self.used[tier] = used
