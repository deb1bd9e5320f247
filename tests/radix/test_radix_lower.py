"""Leases that reach below the top tier, what is to leave, what is lost, and what should not have been let go."""

from __future__ import annotations

import pytest

from radix import ResidenceError, StalePathError


@pytest.fixture
def three(make_store):
    return make_store(4, tiers=("hbm", "ram", "nvme"))


def put(store, tier, path, first, last):
    """Copies of known[first:last], in slots that tell tier and place."""
    base = {"ram": 100, "nvme": 200}[tier]
    store.tree.placed(tier, path.known[first:last].tolist(), [base + i for i in range(first, last)])


def forget(store, tier, n):
    store.tree.dropped(tier, [victim.block for victim in store.tree.victims(tier, n)])


def tier_stats(store, tier):
    return store.tree.stats()["tiers"][tier]


@pytest.fixture
def low(three):
    """Four blocks: hbm | ram | nvme | nvme."""
    path = three.insert(range(16))
    put(three, "ram", path, 1, 2)
    put(three, "nvme", path, 2, 4)
    three.evict(3)
    return three


def test_reach_ends_at_the_first_block_that_is_nowhere(low):
    path = low.match(range(16))
    assert (path.n_blocks, low.tree.reach(path)) == (1, 4)
    low.tree.lost("nvme", [int(path.known[2])], "bad")
    path = low.match(range(16))
    assert low.tree.reach(path) == 2
    assert path.evicted_tokens == 4


def test_a_lease_that_reaches_keeps_its_blocks_in_every_tier(low):
    path = low.match(range(16))
    lease = low.tree.lease(path, "request 1", reach=3)
    assert [low.tree.evictable(tier) for tier in low.tree.tiers] == [0, 0, 1]
    assert [v.slot for v in low.tree.victims("nvme", 9)] == [203]
    low.tree.dropped("nvme", [int(path.known[3])])
    assert low.tree.victims("ram", 9) == low.tree.victims("nvme", 9) == []
    assert low.tree.audit() == []
    lease.release()
    assert [low.tree.evictable(tier) for tier in low.tree.tiers] == [1, 1, 1]
    assert low.tree.audit() == []


def test_what_a_lease_reaches_becomes_resident_under_it(low):
    path = low.match(range(16))
    lease = low.tree.lease(path, "request 1", reach=4)
    low.tree.placed("hbm", path.known[1:3].tolist(), low.take(2))
    assert low.tree.evictable("hbm") == 0
    assert low.audit() == []
    lease.advance(low.tree.path_to(int(path.known[2])))  # not so far as it reaches: that is still held
    assert low.tree.evictable("nvme") == 0
    low.tree.placed("hbm", path.known[3:].tolist(), low.take(1))
    lease.advance(low.match(range(16)))
    low.tree.dropped("nvme", [])
    assert low.tree.leases() == [("request 1", 16, 100.0)]
    assert low.tree.evictable("hbm") == 0
    lease.release()
    assert low.tree.evictable("hbm") == 4
    assert low.audit() == []


def test_a_reach_to_a_block_that_went_since_the_match_is_refused(make_store):
    store = make_store(4, tiers=("hbm", "ram", "nvme"), max_ghosts=0)
    path = store.insert(range(8))
    put(store, "nvme", path, 1, 2)
    store.evict(1)
    path = store.match(range(8))
    forget(store, "nvme", 1)
    for refused in (
        lambda: store.tree.lease(path, "late", reach=2),
        lambda: store.tree.touch(path, reach=2),
    ):
        with pytest.raises(StalePathError, match="2 blocks"):
            refused()
    store.insert([*range(4), 90, 91, 92, 93, 94, 95, 96, 97])  # its id is used again
    assert store.tree.leases() == []
    assert store.audit() == []


def test_what_leaves_for_good_under_a_lease_that_reaches_is_forgotten_when_that_ends(make_store):
    store = make_store(4, tiers=("hbm", "nvme"), max_ghosts=0)
    store.insert(range(8))
    (victim,) = store.tree.victims("hbm", 1)  # on its way to NVMe, where it does not arrive
    path = store.tree.path_to(victim.block)
    lease = store.tree.lease(path, "persist", counted=None, reach=2)
    store.tree.dropped("hbm", [victim.block])
    store.in_use.discard(victim.slot)
    assert store.tree.stats()["blocks"] == 2
    assert store.audit() == []
    lease.release()
    assert store.tree.stats()["blocks"] == 1
    assert store.audit() == []


def test_a_touch_with_reach_makes_the_part_below_young(three, clock):
    first, second = three.insert([1] * 8), three.insert([2] * 8)
    for i, path in enumerate((first, second)):
        three.tree.placed("nvme", path.known.tolist(), [200 + 2 * i, 201 + 2 * i])
    three.evict(4)
    clock.now += 5
    path = three.match([1] * 8)
    three.tree.touch(path)
    assert three.tree.coming("nvme", 1)[0].slot == 201
    three.tree.touch(path, reach=2)
    assert [victim.slot for victim in three.tree.victims("nvme", 4)] == [203, 202, 201, 200]


# -- what is to leave


def without_heaps(stats):
    """Obsolete entries may come and go."""
    for tier in stats["tiers"].values():
        del tier["heap"]
    return stats


def test_coming_is_what_victims_gives_next_and_changes_nothing(low):
    low.insert([*range(4), 50, 51, 52, 53])
    path = low.insert([60] * 8)
    put(low, "ram", path, 0, 1)
    before = without_heaps(low.tree.stats())
    for _ in range(3):
        for tier in low.tree.tiers:
            low.tree.coming(tier, 9)
    assert without_heaps(low.tree.stats()) == before
    assert low.audit() == []
    for tier, n in (("hbm", 2), ("ram", 1), ("nvme", 9), ("hbm", 9), ("ram", 9)):
        coming = low.tree.coming(tier, n)
        assert coming
        assert low.tree.victims(tier, n) == coming
    assert low.tree.coming("hbm", 9) == []


def test_looking_at_what_comes_does_not_grow_the_heaps(three, clock):
    for i in range(30):
        path = three.insert([i + 1] * 8)
        three.tree.placed("ram", path.blocks.tolist(), [100 + 2 * i, 101 + 2 * i])
    for _ in range(200):
        clock.now += 1
        three.tree.coming("hbm", 20)
        three.tree.coming("ram", 20)
    assert tier_stats(three, "hbm")["heap"] <= 60
    assert tier_stats(three, "ram")["heap"] <= 60
    assert three.tree.audit() == []


# -- what is lost


def test_a_copy_that_is_lost_leaves_a_hole_until_it_is_written_again(three):
    path = three.insert(range(12))
    put(three, "nvme", path, 0, 3)
    block = int(path.known[1])
    three.tree.lost("nvme", [block], "bad_record")
    assert tier_stats(three, "nvme")["holes"] == 1
    assert tier_stats(three, "nvme")["evicted_by_reason"] == {"bad_record": 1}
    assert three.tree.slot("nvme", block) == -1
    assert three.audit() == []
    put(three, "nvme", path, 1, 2)
    assert tier_stats(three, "nvme")["holes"] == 0
    three.tree.lost("nvme", [block], "bad_record")
    forget(three, "nvme", 1)  # what lay behind it
    assert tier_stats(three, "nvme")["holes"] == 0
    assert three.audit() == []


def test_a_hole_before_a_fork_is_one(three):
    trunk = three.insert(range(8))
    for i, end in enumerate(([8, 8, 8, 8], [9, 9, 9, 9])):
        path = three.insert([*range(8), *end])
        three.tree.placed("nvme", [int(path.end)], [210 + i])
    assert tier_stats(three, "nvme")["holes"] == 1
    three.tree.placed("nvme", [int(trunk.known[1])], [201])
    assert tier_stats(three, "nvme")["holes"] == 1  # the first block now
    assert three.audit() == []


def test_what_is_leased_or_in_hbm_is_not_lost(low):
    path = low.match(range(16))
    lease = low.tree.lease(path, "request 1", reach=4)
    with pytest.raises(ResidenceError, match="leased"):
        low.tree.lost("nvme", [int(path.known[3])], "bad")
    lease.release()
    with pytest.raises(ResidenceError, match="can't be lost from hbm"):
        low.tree.lost("hbm", [int(path.known[0])], "bad")
    low.tree.lost("nvme", [int(path.known[3])], "bad")
    with pytest.raises(ResidenceError, match="not in nvme"):
        low.tree.lost("nvme", [int(path.known[3])], "bad")


# -- what should not have been let go


def wanted(store):
    return [tier_stats(store, tier)["evicted_then_wanted"] for tier in store.tree.tiers]


def test_what_is_read_from_below_is_missed_in_each_tier_above_that_let_it_go(low):
    """PITFALLS 17."""
    path = low.match(range(16))
    put(low, "ram", path, 2, 3)
    forget(low, "ram", 1)  # its third block, which is on NVMe too
    assert wanted(low) == [0, 0, 0]
    low.tree.lease(path, "looked, and found no room", counted=None, reach=4).release()
    assert wanted(low) == [0, 0, 0]
    lease = low.tree.lease(path, "request 1", reach=4)
    assert wanted(low) == [3, 1, 0]
    low.tree.placed("hbm", path.known[1:].tolist(), low.take(3))
    lease.release()
    low.tree.lease(low.match(range(16)), "request 2").release()
    assert wanted(low) == [3, 1, 0]  # each once for each time it was let go


def test_what_is_read_from_ram_is_not_missed_on_nvme(low):
    path = low.match(range(16))
    put(low, "ram", path, 2, 4)
    forget(low, "nvme", 2)
    lease = low.tree.lease(path, "request 1", reach=4)
    assert wanted(low) == [3, 0, 0]
    lease.release()


def test_a_restore_of_nobodys_counts_as_it_lands(low):
    path = low.match(range(16))
    put(low, "ram", path, 2, 3)
    low.tree.dropped("ram", [int(path.known[2])])
    low.tree.placed("hbm", path.known[1:3].tolist(), low.take(2))
    assert wanted(low) == [2, 1, 0]
    low.tree.dropped("nvme", [int(path.known[3])])
    put(low, "ram", path, 3, 4)  # a copy that comes to RAM asks for nothing above
    assert wanted(low) == [2, 1, 0]


def test_what_is_computed_again_is_missed_in_each_tier_that_had_it(low, tokens):
    forget(low, "nvme", 2)
    path = low.match(range(16))
    low.tree.extend(path, tokens(range(4, 16)), low.take(3))
    assert wanted(low) == [3, 0, 2]
    assert low.audit() == []


def test_a_copy_that_ram_let_go_is_not_missed_while_hbm_has_the_block(three):
    path = three.insert(range(8))
    put(three, "ram", path, 0, 2)
    forget(three, "ram", 2)
    three.tree.lease(path, "request 1").release()
    assert wanted(three) == [0, 0, 0]
    put(three, "ram", path, 1, 2)  # it is copied there a second time
    assert wanted(three) == [0, 1, 0]


def test_a_victim_that_is_computed_again_before_its_copy_has_ended_was_wanted(three, tokens):
    three.insert(range(8))
    (victim,) = three.tree.victims("hbm", 1)
    three.tree.extend(three.match(range(8)), tokens(range(4, 8)), three.take(1))
    three.tree.dropped("hbm", [victim.block])
    three.in_use.discard(victim.slot)
    assert wanted(three) == [1, 0, 0]
    assert three.audit() == []


def test_what_was_forgotten_and_comes_as_new_is_not_missed(make_store):
    store = make_store(4, max_ghosts=0)
    store.insert(range(8))
    store.evict(2)
    store.insert(range(8))
    assert wanted(store) == [0]


def test_ages_at_hit_are_one_a_lease_and_tier(low, clock):
    """PITFALLS 17."""
    clock.now += 5
    path = low.match(range(16))
    low.tree.touch(path, reach=3)  # the last block is older
    clock.now += 2
    low.tree.lease(path, "resumed", counted=False, reach=4).release()
    clock.now += 2
    low.tree.lease(low.match(range(16)), "request 1", reach=4).release()
    ages = {tier: tier_stats(low, tier)["age_at_hit"] for tier in low.tree.tiers}
    assert {tier: (age["count"], age["max_s"]) for tier, age in ages.items()} == {
        "hbm": (1, 2.0), "ram": (1, 4.0), "nvme": (1, 9.0),
    }  # fmt: skip
    assert low.tree.stats()["age_at_hit"] == ages["hbm"]
