"""Leases, the order of leaving, ghosts, and how much work an eviction is."""

from __future__ import annotations

import random

import pytest

from radix import Facts, LeaseError, ResidenceError
from radix.ages import Ages


def test_the_longest_unused_path_goes_first_and_from_its_tail(store, clock):
    a = store.insert([*range(4), 10, 11, 12, 13, 14, 15, 16, 17])
    clock.now += 1
    b = store.insert([*range(4), 20, 21, 22, 23])
    clock.now += 1
    store.tree.touch(store.match([*range(4), 20, 21, 22, 23]))
    assert store.evict(2) == [int(a.blocks[2]), int(a.blocks[1])]
    assert store.evict(9) == [int(b.blocks[1]), int(b.blocks[0])]
    assert store.audit() == []


def test_of_two_paths_of_one_age_the_deeper_goes_first(store):
    store.insert([1] * 4)
    deep = store.insert([2] * 8)
    assert store.evict(1) == [int(deep.blocks[1])]


def test_a_match_changes_no_age_and_counts_nothing(store, clock):
    """PITFALLS 11: a look-up that is retried is counted once, at its lease."""
    old = store.insert([1] * 4)
    clock.now += 1
    store.insert([2] * 4)
    clock.now += 1
    for _ in range(5):
        path = store.match([1] * 4)
    assert store.tree.stats()["hits"] == 0
    assert store.evict(1) == [int(old.blocks[0])]
    store.insert([1] * 4)
    for _ in range(5):
        path = store.match([1] * 4)
    store.tree.lease(path, "once").release()
    assert (store.tree.stats()["hits"], store.tree.stats()["hit_tokens"]) == (1, 4)


def test_a_preempted_request_that_comes_back_is_no_hit(store):
    """PITFALLS 11."""
    store.insert(range(8))
    store.tree.lease(store.match(range(8)), "resumed", counted=False).release()
    assert store.tree.stats()["hits"] == 0


def test_an_admission_that_found_no_room_leaves_no_trace(store, clock):
    """PITFALLS 11: only the try that succeeds is counted, with the age that the path then had."""
    store.insert([1] * 4)
    clock.now += 1
    store.insert([2] * 4)
    clock.now += 1
    for _ in range(3):
        store.tree.lease(store.match([1] * 4), "no room", counted=None).release()
    assert store.tree.victims("hbm", 1)[0].slot == 0
    store.tree.kept("hbm", [0])
    clock.now += 8
    lease = store.tree.lease(store.match([1] * 4), "room", counted=None)
    lease.confirm()
    with pytest.raises(LeaseError, match="confirmed"):
        lease.confirm()
    lease.release()
    stats = store.tree.stats()
    assert (stats["hits"], stats["age_at_hit"]["max_s"]) == (1, 10.0)
    assert store.tree.victims("hbm", 1)[0].slot == 1


def test_what_is_leased_stays_and_what_was_leased_is_young(store, clock):
    path = store.insert(range(12))
    lease = store.tree.lease(store.match(range(8)), "request 1")
    assert store.tree.evictable("hbm") == 1
    assert len(store.evict(9)) == 1
    assert store.tree.evictable("hbm") == 0
    clock.now += 5
    store.insert([7] * 4)
    clock.now += 1
    lease.release()
    assert store.tree.evictable("hbm") == 3
    assert store.evict(1) != [int(path.blocks[1])]
    assert store.audit() == []


def test_a_lease_holds_under_a_split(store):
    store.insert(range(16))
    lease = store.tree.lease(store.match(range(8)), "two blocks")
    store.insert([*range(4), 50, 51, 52, 53])
    store.evict(99)
    assert store.match(range(16)).n_tokens == 8
    lease.release()
    store.evict(99)
    assert store.tree.resident("hbm") == 0


def test_a_lease_moves_forward_with_its_path(store, tokens):
    lease = store.tree.lease(store.match([]), "request 1")
    lease.extend(tokens(range(8)), store.take(2))
    extended = store.tree.extend(lease.path, tokens(range(8, 12)), store.take(1))
    assert store.tree.evictable("hbm") == 1
    lease.advance(extended.path)
    assert store.tree.evictable("hbm") == 0
    assert store.tree.leases() == [("request 1", 12, 100.0)]
    lease.release()
    assert store.tree.evictable("hbm") == 3
    assert store.tree.leases() == []


def test_a_lease_ends_once(store):
    store.insert(range(4))
    lease = store.tree.lease(store.match(range(4)), "request 1")
    lease.release()
    with pytest.raises(LeaseError, match="request 1"):
        lease.release()
    with pytest.raises(LeaseError):
        lease.advance(store.match(range(4)))


def test_what_is_leased_or_has_children_cannot_be_reported_dropped(store):
    path = store.insert(range(8))
    with pytest.raises(ResidenceError, match="children"):
        store.tree.dropped("hbm", [path.blocks[0]])
    lease = store.tree.lease(path, "request 1")
    with pytest.raises(ResidenceError, match="leased"):
        store.tree.dropped("hbm", [path.blocks[1]])
    lease.release()
    store.evict(1)
    with pytest.raises(ResidenceError, match="not in hbm"):
        store.tree.dropped("hbm", [path.blocks[1]])


def test_a_victim_is_not_matched_but_its_slot_is_in_use_until_it_is_reported(store):
    store.insert(range(8))
    (victim,) = store.tree.victims("hbm", 1)
    assert (victim.slot, victim.n_tokens) == (1, 4)
    assert store.match(range(8)).n_tokens == 4
    assert (store.tree.resident("hbm"), store.tree.leaving("hbm")) == (1, 1)
    assert store.audit() == []
    store.tree.kept("hbm", [victim.block])
    assert store.match(range(8)).n_tokens == 8
    assert store.evict(1) == [victim.block]
    assert store.audit() == []


def test_a_policy_is_a_function_of_facts(make_store, clock):
    def first_in_first_out(facts: Facts) -> float:
        return facts.born

    store = make_store(policy=first_in_first_out)
    first = store.insert([1] * 4)
    store.insert([2] * 4)
    clock.now += 1
    store.tree.lease(store.match([1] * 4), "uses the older one").release()
    assert store.evict(1) == [int(first.blocks[0])]


def test_ghosts_say_when_from_where_and_why(store, clock):
    store.insert(range(12))
    clock.now = 130.0
    store.evict(2, reason="space")
    clock.now = 150.0
    path = store.match(range(16))
    assert (path.n_tokens, path.evicted_tokens) == (4, 8)
    assert path.ghost == (130.0, "hbm", "space")
    stats = store.tree.stats()["tiers"]["hbm"]
    assert stats["evicted_by_reason"] == {"space": 2}
    assert stats["age_at_eviction"]["max_s"] == 30.0


def test_ghosts_are_bounded_and_the_oldest_goes(make_store):
    store = make_store(max_ghosts=2)
    store.insert(range(20))
    store.evict(4)
    path = store.match(range(20))
    assert (path.n_tokens, path.evicted_tokens) == (4, 8)
    assert store.tree.stats()["ghosts"] == 2
    assert store.tree.stats()["blocks"] == 3
    assert store.audit() == []


def test_without_ghosts_an_empty_tree_holds_nothing(make_store):
    store = make_store(max_ghosts=0)
    store.insert(range(400))
    store.insert([*range(200), *range(1000, 1100)])
    store.evict(1_000)
    stats = store.tree.stats()
    assert (stats["blocks"], stats["nodes"], stats["namespaces"], stats["ghosts"]) == (0, 0, 0, 0)
    assert store.audit() == []


def test_an_eviction_at_100000_leaves_pops_one_entry(make_store, clock, tokens):
    """PITFALLS 24, in operations: no leaf but the victim is looked at."""
    store = make_store(1)
    head = store.insert([0])
    for i in range(100_000):
        store.tree.extend(head, tokens([i + 1]), [i + 1])
    clock.now += 1
    before = store.tree.stats()["tiers"]["hbm"]["heap_pops"]
    for _ in range(1_000):
        assert len(store.evict(1)) == 1
    assert store.tree.stats()["tiers"]["hbm"]["heap_pops"] - before == 1_000


def test_uses_between_evictions_cost_one_pop_each(make_store, clock):
    """However leaves are used, pops are at most one an eviction and two a release."""
    rng = random.Random(3)
    store = make_store(1)
    for i in range(500):
        store.insert([0, i + 1])
    n_leases = n_evictions = 0
    while store.tree.resident("hbm") > 100:
        clock.now += 1
        for _ in range(rng.randrange(4)):
            store.tree.lease(store.match([0, rng.randrange(500) + 1]), "turn").release()
            n_leases += 1
        n_evictions += len(store.evict(1))
        assert store.tree.stats()["tiers"]["hbm"]["heap_pops"] <= n_evictions + 2 * n_leases
    assert store.audit() == []


def test_the_heap_does_not_grow_with_uses(make_store, clock):
    store = make_store(1)
    for i in range(50):
        store.insert([i])
    for i in range(20_000):
        clock.now += 1
        store.tree.lease(store.match([i % 50]), "turn").release()
    assert store.tree.stats()["tiers"]["hbm"]["heap"] <= 50


def test_the_heap_does_not_keep_every_end_that_a_path_has_had(store, tokens):
    path = store.match([])
    for i in range(5_000):
        path = store.tree.extend(path, tokens([i] * 4), [i]).path
    assert store.tree.stats()["tiers"]["hbm"]["heap"] <= 1_024


def test_ages_are_summed_up_within_a_factor_of_two():
    ages = Ages()
    for age in (0.5, 0.5, 0.5, 3.0, 100.0):
        ages.add(age)
    summary = ages.summary()
    assert (summary["count"], summary["max_s"], summary["mean_s"]) == (5, 100.0, pytest.approx(20.9))
    assert 0.5 <= summary["p50_s"] <= 1.0
    assert summary["p90_s"] == 100.0
    assert Ages().summary() == {"count": 0, "mean_s": 0.0, "p50_s": 0.0, "p90_s": 0.0, "max_s": 0.0}


def test_after_a_long_steady_load_nothing_is_left_over(make_store, clock):
    """PITFALLS 20, at the tree: growing sessions come and go in a pool of 400 blocks."""
    rng = random.Random(1)
    store = make_store(4, max_ghosts=200)
    sessions: list[list[int]] = []
    for turn in range(3_000):
        clock.now += rng.random()
        if not sessions or rng.random() < 0.05:
            sessions.append([0] * 20 + [turn + 1])
        session = rng.choice(sessions[-8:])
        session += [rng.randrange(50) for _ in range(rng.randrange(30))]
        path = store.match(session)
        lease = store.tree.lease(path, f"turn {turn}")
        short = len(session) // 4 - path.n_blocks - (400 - store.tree.resident("hbm"))
        store.evict(max(0, short))
        lease.advance(store.insert(session))
        lease.release()
        if len(session) > 600:
            sessions.remove(session)
    stats = store.tree.stats()
    assert store.tree.resident("hbm") <= 400
    assert stats["leases"] == stats["tiers"]["hbm"]["leased"] == 0
    assert stats["ghosts"] <= 200
    assert stats["blocks"] <= 600
    assert stats["hits"] > 2_000
    assert store.audit() == []
