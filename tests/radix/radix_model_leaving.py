"""The model's other half: what leaves a tier, comes back to it, and what holds after every step.

After every step the audit must be clean, with the slots that the model thinks are in use.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from radix_model import Growing, Key

from radix import ResidenceError, Victim


class Model(Growing):
    # -- leaving

    def choose(self, tier: str, n: int, *, foreseen: bool = False) -> list[Key]:
        keys = []
        coming = self.foresee(tier, n) if foreseen else None
        victims = self.tree.victims(tier, n)
        assert coming is None or victims == coming
        for victim in victims:
            order = self.candidates(tier)
            key = next(k for k in order if self.known[k].id == victim.block)
            assert order[key] == min(order.values()), "another should have gone first"
            block = self.known[key]
            assert victim.slot == block.slots[tier]
            rest = len(key[1]) % self.stride
            assert victim.n_tokens == (rest // 4 or self.block_size)
            block.leaving[tier] = block.slots.pop(tier)
            keys.append(key)
        assert len(keys) == n or not self.candidates(tier)
        return keys

    def foresee(self, tier: str, n: int) -> list[Victim]:
        before = self.all_that_shows()
        coming = self.tree.coming(tier, n)
        assert self.all_that_shows() == before
        return coming

    def all_that_shows(self) -> object:
        """Less the size of heaps: obsolete entries may go at any time."""
        stats = self.tree.stats()
        for tier in stats["tiers"].values():
            del tier["heap"]
        return stats, {b.id: self.tree.where(b.id) for b in self.known.values()}

    @rule(tier=st.integers(0, 2), n=st.integers(1, 6))
    def look_at_what_would_leave(self, tier: int, n: int) -> None:
        self.foresee(self.tiers[tier % len(self.tiers)], n)

    def report(self, tier: str, key: Key) -> None:
        block = self.known[key]
        self.release_slot(block.leaving.pop(tier), tier)
        self.left(tier, block)
        self.tree.dropped(tier, [block.id])

    @rule(tier=st.integers(0, 2), n=st.integers(1, 6), foreseen=st.booleans())
    def evict(self, tier: int, n: int, foreseen: bool) -> None:
        name = self.tiers[tier % len(self.tiers)]
        for key in self.choose(name, n, foreseen=foreseen):
            self.report(name, key)

    @rule(tier=st.integers(0, 2), n=st.integers(1, 3), foreseen=st.booleans())
    def begin_to_evict(self, tier: int, n: int, foreseen: bool) -> None:
        self.choose(self.tiers[tier % len(self.tiers)], n, foreseen=foreseen)

    @precondition(lambda self: any(b.leaving for b in self.known.values()))
    @rule(tier=st.integers(0, 2))
    def report_what_left(self, tier: int) -> None:
        name = self.tiers[tier % len(self.tiers)]
        for key in [k for k, b in self.known.items() if name in b.leaving]:
            self.report(name, key)

    @precondition(lambda self: any(b.leaving for b in self.known.values()))
    @rule(tier=st.integers(0, 2))
    def keep_what_was_leaving(self, tier: int) -> None:
        name = self.tiers[tier % len(self.tiers)]
        leaving = sorted((k for k, b in self.known.items() if name in b.leaving), key=lambda k: len(k[1]))
        for key in leaving:
            block, above = self.known[key], self.parent(key)
            orphan = name == "hbm" and above[1] and "hbm" not in self.known[above].slots
            if name in block.slots or orphan:
                continue
            if self.is_tail(key):
                block.doomed = self.repeated(key)
            freed = self.retire_tail(above, key) if name == "hbm" and not self.is_tail(key) else []
            assert self.tree.kept(name, [block.id]) == freed
            for one in freed:
                self.release_slot(one)
            block.slots[name] = block.leaving.pop(name)

    def repeated(self, tail: Key) -> bool:
        return any(
            k[1].startswith(tail[1]) and "hbm" in self.known[k].slots
            for k in self.below(self.parent(tail))
            if k != tail
        )

    @rule(which=st.integers(0, 99))
    def drop_unasked(self, which: int) -> None:
        """A report about any block in HBM: refused unless nobody holds it and nothing stands on it."""
        there = [k for k, b in self.known.items() if "hbm" in b.slots and "hbm" not in b.leaving]
        if not there:
            return
        key = there[which % len(there)]
        block = self.known[key]
        allowed = not self.is_leased(key) and not any("hbm" in self.known[k].slots for k in self.below(key))
        if allowed:
            self.release_slot(block.slots.pop("hbm"))
            self.left("hbm", block)
            self.tree.dropped("hbm", [block.id], "asked")
        else:
            with pytest.raises(ResidenceError):
                self.tree.dropped("hbm", [block.id], "asked")

    @precondition(lambda self: len(self.tiers) > 1 and self.free["ram"])
    @rule(which=st.integers(0, 99))
    def spill(self, which: int) -> None:
        """Copy a block to RAM: down, also one that is on its way out of HBM, or up."""
        there = [
            k
            for k, b in self.known.items()
            if (b.slots or b.leaving)
            and not {"ram"} & (b.slots.keys() | b.leaving.keys())
            and not self.is_tail(k)
        ]
        if there:
            block = self.known[there[which % len(there)]]
            self.came_back("ram", block)
            block.slots["ram"] = self.slot("ram")
            self.tree.placed("ram", [block.id], [block.slots["ram"]])

    @precondition(lambda self: len(self.tiers) > 1 and self.free["hbm"])
    @rule(which=st.integers(0, 99))
    def restore(self, which: int) -> None:
        below = [k for k, b in self.known.items() if b.slots and not {"hbm"} & (b.slots | b.leaving).keys()]
        if not below:
            return
        key = below[which % len(below)]
        above, block = self.parent(key), self.known[key]
        slot = self.slot()
        if above[1] and "hbm" not in self.known[above].slots:
            with pytest.raises(ResidenceError):
                self.tree.placed("hbm", [block.id], [slot])
            self.release_slot(slot)
            return
        self.want(block)
        block.slots["hbm"] = slot
        freed = self.retire_tail(above, key)
        assert self.tree.placed("hbm", [block.id], [slot]) == freed
        for one in freed:
            self.release_slot(one)

    # -- after every step

    @invariant()
    def audit_is_clean(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.tree.audit(self.used) == []

    @invariant()
    def ages_and_uses_agree(self) -> None:
        """Notes on edges and columns together say what was written block by block."""
        for key, block in self.known.items() if hasattr(self, "tree") else ():
            if block.slots:
                facts = self.tree._residence.facts(block.id)
                assert facts.last_use == block.last_use, key
                if self.max_ghosts > 1000:  # what was forgotten begins again
                    assert facts.uses == block.uses, key

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        for tier in self.tiers:
            there = [k for k, b in self.known.items() if tier in b.slots]
            assert self.tree.resident(tier) == len(there)
            assert self.tree.leaving(tier) == sum(tier in b.leaving for b in self.known.values())
            assert self.tree.evictable(tier) == sum(not self.is_leased(k) for k in there)
            stats = self.tree.stats()["tiers"][tier]
            if tier not in ("hbm", "ram"):
                assert stats["holes"] == sum(
                    tier not in b.slots and any(tier in self.known[k].slots for k in self.below(key))
                    for key, b in self.known.items()
                )
            if self.max_ghosts > 1000:  # what is forgotten is not missed
                assert stats["evicted_then_wanted"] == self.wanted[tier]
            if tier != "hbm":
                assert stats["age_at_hit"]["count"] == self.hits_below[tier]

    def teardown(self) -> None:
        """In the end everything can go, and nothing is left."""
        if not hasattr(self, "tree"):
            return
        for held in self.held:
            held.lease.release()
            if held.lease.confirmed:
                self.touch(held.lease.path, held.at, 0)
        self.held = []
        for name in self.tiers:
            for key in [k for k, b in self.known.items() if name in b.leaving]:
                self.report(name, key)
        for name in self.tiers:
            assert self.tree.evictable(name) == self.tree.resident(name)
            for key in self.choose(name, 10**6):
                self.report(name, key)
            assert self.tree.resident(name) == 0
        assert self.tree.audit({tier: set() for tier in self.tiers}) == []
        if self.max_ghosts == 0:
            assert self.tree.stats()["blocks"] == self.tree.stats()["nodes"] == 0
            assert self.tree.stats()["namespaces"] == 0
