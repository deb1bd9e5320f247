"""Several tiers: copies below, and leaving one tier for another."""

from __future__ import annotations

import pytest

from radix import ResidenceError


@pytest.fixture
def two(make_store):
    return make_store(4, tiers=("hbm", "ram"))


def test_forgotten_is_what_left_its_last_tier(two):
    path = two.insert(range(12))
    two.tree.placed("ram", path.blocks[1:].tolist(), [70, 71])
    two.evict(2)
    found = two.match(range(12))
    assert (found.n_tokens, found.known_tokens, found.evicted_tokens) == (4, 12, 0)
    assert two.tree.residence(found).tolist() == [0b01, 0b10, 0b10]
    two.evict(1, "ram")
    found = two.match(range(12))
    assert found.evicted_tokens == 4
    assert found.ghost.tier == "ram"
    assert two.tree.audit({"hbm": {0}, "ram": {70}}) == []


def test_a_hole_is_a_block_forgotten_in_the_middle_of_what_is_known(two):
    path = two.insert(range(12))
    two.tree.placed("ram", [int(path.blocks[2])], [72])
    two.evict(2)
    found = two.match(range(12))
    assert two.tree.residence(found).tolist() == [0b01, 0b00, 0b10]
    assert (found.known_tokens, found.evicted_tokens) == (12, 4)
    assert two.tree.audit({"hbm": {0}, "ram": {72}}) == []


def test_in_ram_what_is_also_in_hbm_goes_first(two, clock):
    old = two.insert([1] * 8)
    clock.now += 1
    new = two.insert([2] * 8)
    two.tree.placed("ram", old.blocks.tolist() + new.blocks.tolist(), [50, 51, 52, 53])
    two.evict(2)  # the old path leaves HBM, and is in RAM alone
    assert [victim.slot for victim in two.tree.victims("ram", 4)] == [53, 52, 51, 50]


def test_a_restore_fills_hbm_from_the_head(two):
    path = two.insert(range(8))
    two.tree.placed("ram", path.blocks.tolist(), [50, 51])
    two.evict(2)
    with pytest.raises(ResidenceError, match="before its parent"):
        two.tree.placed("hbm", [int(path.blocks[1])], [9])
    two.tree.placed("hbm", path.blocks.tolist(), [8, 9])
    assert two.tree.slots(two.match(range(8))).tolist() == [8, 9]
    assert two.tree.audit({"hbm": {8, 9}, "ram": {50, 51}}) == []


def test_a_tail_lives_in_the_top_tier_only(two, tokens):
    tail = two.tree.set_tail(two.match([]), tokens([1]), 5)
    with pytest.raises(ResidenceError, match="tail"):
        two.tree.placed("ram", [tail.block], [50])


def test_a_leased_path_stays_in_every_tier(two):
    path = two.insert(range(8))
    two.tree.placed("ram", path.blocks.tolist(), [50, 51])
    lease = two.tree.lease(path, "request 1")
    assert (two.tree.evictable("ram"), two.tree.victims("ram", 2)) == (0, [])
    lease.release()
    assert len(two.tree.victims("ram", 2)) == 2


def test_a_sibling_that_gives_part_of_a_block_in_ram_takes_nothing_from_what_is_evicted(two, clock, tokens):
    path = two.insert(range(12))
    two.tree.placed("ram", [int(path.blocks[1])], [50])
    clock.now += 1
    two.tree.set_tail(two.match(range(4)), tokens([4, 5, 99]), 30)
    two.evict(2)
    found = two.match(range(12))
    assert two.tree.residence(found).tolist() == [0b01, 0b10, 0b00]
    assert (found.n_tokens, found.partial.n_tokens, found.evicted_tokens) == (4, 2, 4)
