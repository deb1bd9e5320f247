"""Token grain: partial blocks and tails, and what is said of tokens that can't be reused."""

from __future__ import annotations

import pytest

from radix import ArgumentError, ResidenceError, TailKept, TailNotKept


def test_the_longest_agreeing_of_many_children_is_found(make_store):
    store = make_store(8)
    head = list(range(8))
    for i in range(300):
        store.insert([*head, 7, i // 100, i // 10 % 10, i % 10, 1, 1, 1, 1])
    path = store.match([*head, 7, 1, 4, 2, 1, 1, 9, 9])
    assert path.n_tokens == 8
    assert path.partial is not None
    assert (path.partial.n_tokens, path.partial.slot) == (6, 1 + 142)
    assert not path.partial.whole
    assert path.rounded_tokens == 0


def test_a_tail_continues_its_path(store, tokens):
    path = store.insert(range(8))
    assert isinstance(store.tree.set_tail(path, tokens([8, 9]), 30), TailKept)
    found = store.match(range(12))
    assert (found.n_tokens, found.partial.n_tokens, found.partial.slot) == (8, 2, 30)
    assert found.partial.whole
    part = store.match([*range(9), 77, 78, 79])
    assert (part.partial.n_tokens, part.partial.whole) == (1, False)


def test_a_short_prompt_has_only_a_tail(store, tokens):
    store.tree.set_tail(store.match([]), tokens([5, 6]), 3)
    path = store.match([5, 6, 7])
    assert (path.n_tokens, path.reusable_tokens, path.partial.slot) == (0, 2, 3)
    assert store.tree.audit({"hbm": {3}}) == []


def test_of_two_tails_the_longer_stays(store, tokens):
    path = store.insert(range(4))
    store.tree.set_tail(path, tokens([4, 5]), 20)
    assert store.tree.set_tail(path, tokens([4]), 21) == TailNotKept(21)
    assert store.tree.set_tail(path, tokens([8, 9]), 22) == TailNotKept(22)
    kept = store.tree.set_tail(path, tokens([7, 8, 9]), 23)
    assert isinstance(kept, TailKept)
    assert kept.freed_slots == [20]
    assert store.match([*range(4), 7, 8, 9, 1]).partial.slot == 23
    assert store.tree.audit({"hbm": {0, 23}}) == []


def test_a_tail_that_a_child_repeats_is_not_kept(store, tokens):
    store.insert(range(12))
    assert store.tree.set_tail(store.match(range(8)), tokens([8, 9]), 30) == TailNotKept(30)  # inside an edge
    store.insert([*range(8), 50, 51, 52, 53])
    assert store.tree.set_tail(store.match(range(8)), tokens([50, 51]), 30) == TailNotKept(30)  # at a fork
    assert isinstance(store.tree.set_tail(store.match(range(8)), tokens([50, 52]), 30), TailKept)


def test_a_tail_that_new_blocks_repeat_is_freed(store, tokens):
    path = store.insert(range(8))
    store.tree.set_tail(path, tokens([8, 9]), 30)
    other = store.tree.extend(path, tokens([8, 8, 8, 8]), [31])
    assert other.freed_slots == []
    whole = store.tree.extend(path, tokens(range(8, 12)), [32])
    assert whole.freed_slots == [30]
    assert store.tree.stats()["tails"] == 0
    assert store.tree.audit({"hbm": {0, 1, 31, 32}}) == []


def test_a_tail_in_the_middle_of_an_edge_splits_it(store, tokens):
    store.insert(range(16))
    store.tree.set_tail(store.match(range(8)), tokens([90, 91]), 30)
    assert store.match([*range(8), 90, 91, 92, 93]).partial.slot == 30
    assert store.match(range(16)).n_tokens == 16
    assert store.tree.audit({"hbm": {0, 1, 2, 3, 30}}) == []


def test_a_taken_tail_is_nobody_elses(store, tokens):
    path = store.insert(range(4))
    store.tree.set_tail(path, tokens([4, 5]), 20)
    assert store.tree.take_tail(store.match([*range(4), 4, 9])) is None  # agrees only in part
    assert store.tree.take_tail(store.match(range(8))) == 20
    assert store.match(range(8)).partial is None
    assert store.tree.audit({"hbm": {0}}) == []


def test_a_leased_tail_is_not_taken_replaced_or_freed_under_its_holder(store, tokens):
    path = store.insert(range(4))
    store.tree.set_tail(path, tokens([4, 5]), 20)
    lease = store.tree.lease(store.match(range(8)), "copies slot 20")
    assert store.tree.take_tail(store.match(range(8))) is None
    assert store.tree.set_tail(path, tokens([4, 5, 6]), 21) == TailNotKept(21)
    assert store.tree.extend(path, tokens(range(4, 8)), [22]).freed_slots == []
    assert [victim.slot for victim in store.tree.victims("hbm", 9)] == [22]  # not 20, and not what it stands on
    store.tree.kept("hbm", [store.match(range(8)).known[1]])
    lease.release()
    assert store.tree.audit({"hbm": {0, 20, 22}}) == []
    assert [victim.slot for victim in store.tree.victims("hbm", 1)] == [20]  # repeated by a child: first of all


def test_a_sole_holder_may_grow_a_tail_in_its_slot(store, tokens):
    path = store.insert(range(4))
    store.tree.set_tail(path, tokens([4]), 20)
    lease = store.tree.lease(store.match(range(8)), "appends in place")
    kept = store.tree.set_tail(path, tokens([4, 5, 6]), 20)
    assert isinstance(kept, TailKept)
    assert kept.freed_slots == []
    assert store.match(range(8)).partial.n_tokens == 3
    whole = lease.extend(tokens(range(4, 8)), [20])
    assert whole.freed_slots == []
    assert store.tree.audit({"hbm": {0, 20}}) == []
    assert store.tree.evictable("hbm") == 0
    lease.release()
    assert store.tree.evictable("hbm") == 2


def test_a_slot_that_two_hold_is_not_appended_to(store, tokens):
    path = store.insert(range(4))
    store.tree.set_tail(path, tokens([4]), 20)
    first, second = (store.tree.lease(store.match(range(8)), name) for name in ("a", "b"))
    with pytest.raises(ResidenceError, match="2 leases"):
        first.extend(tokens(range(4, 8)), [20])
    second.release()
    first.release()


def test_a_whole_block_is_no_tail(store, tokens):
    path = store.insert(range(4))
    for n in (0, 4):
        with pytest.raises(ArgumentError, match=f"a tail of {n} tokens"):
            store.tree.set_tail(path, tokens(range(n)), 9)


def test_an_evicted_block_that_agrees_in_part_is_rounding_one_that_agrees_wholly_is_evicted(store):
    store.insert(range(16))
    store.evict(2)
    path = store.match([*range(8), 8, 9, 10, 11, 12, 13, 99, 99])
    assert (path.n_tokens, path.evicted_tokens, path.rounded_tokens) == (8, 4, 2)
    path = store.match([*range(8), 8, 9, 99, 99])
    assert (path.n_tokens, path.evicted_tokens, path.rounded_tokens) == (8, 0, 2)


def test_a_sibling_in_hbm_gives_part_of_an_evicted_block(store, clock, tokens):
    store.insert(range(8))
    clock.now += 1
    store.tree.set_tail(store.match(range(4)), tokens([4, 5, 99]), 30)
    store.evict(1)
    path = store.match(range(8))
    assert (path.n_tokens, path.partial.n_tokens, path.evicted_tokens) == (4, 2, 2)
    assert path.known_tokens == 8
