"""Looking up and growing: hand-worked cases."""

from __future__ import annotations

import numpy as np
import pytest

from radix import Adopted, ArgumentError, DuplicateOf, RadixTree, StalePathError
from radix.node import common_tokens


def test_nothing_is_known_of_an_empty_tree(store):
    path = store.match(range(100))
    assert (path.n_tokens, path.known_tokens, path.partial, path.evicted_tokens) == (0, 0, None, 0)
    assert store.tree.slots(path).tolist() == []
    assert store.audit() == []


def test_a_prefix_is_found_block_by_block_with_its_slots(store):
    store.insert(range(12))
    path = store.match([*range(8), 99, 99, 99, 99])
    assert path.n_tokens == 8
    assert path.blocks.dtype == np.int32
    assert store.tree.slots(path, "hbm").tolist() == [0, 1]


def test_71320_of_71324_tokens_agree_and_all_their_blocks_are_reused(make_store):
    """PITFALLS 3: the stored entry is longer, and the divergence is inside its one edge."""
    store = make_store(16)
    stored = [i * 7 % 50_000 for i in range(80_000)]
    store.insert(stored)
    asked = [*stored[:71_320], 50_001, 50_002, 50_003, 50_004]
    path = store.match(asked)
    assert path.n_tokens == 71_312  # 4,457 whole blocks
    assert path.partial is not None
    assert (path.partial.n_tokens, path.partial.slot) == (8, 4_457)
    assert path.reusable_tokens == 71_320
    assert store.tree.slots(path).tolist() == list(range(4_457))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_prompt_of_whole_blocks_leaves_its_last_token_to_be_computed(make_store, extra):
    """PITFALLS 31 at the tree: asked for all but the last token, k blocks + extra give k·16 + extra - 1 tokens."""
    store = make_store(16)
    store.insert(range(64))
    path = store.tree.match(store.space, np.arange(48 + extra, dtype=np.int32).tobytes(), 48 + extra - 1)
    assert path.n_tokens == (48 if extra else 32)
    assert (path.partial.n_tokens if path.partial else 0) == (0 if extra else 15)
    assert path.reusable_tokens == 48 + extra - 1


def test_a_limit_inside_a_block_cuts_what_is_found(store):
    store.insert(range(12))
    path = store.tree.match(store.space, np.arange(12, dtype=np.int32).tobytes(), 6)
    assert (path.n_tokens, path.partial.n_tokens, path.rounded_tokens) == (4, 2, 0)


def test_a_fork_shares_its_head_by_reference(store):
    """PITFALLS 10: no second copy of the head, and both branches are found whole."""
    store.insert([*range(16), 20, 21, 22, 23])
    fork = store.insert([*range(16), 30, 31, 32, 33])
    assert store.tree.resident("hbm") == 6
    assert store.tree.slots(fork).tolist() == [0, 1, 2, 3, 5]
    assert store.match([*range(16), 20, 21, 22, 23]).n_tokens == 20
    assert store.audit() == []


def test_compaction_keeps_head_and_old_branch_and_says_where_they_part(store):
    """PITFALLS 9: the middle is rewritten; the old branch stays reusable."""
    old = list(range(40))
    store.insert(old)
    new = [*range(12), *range(100, 120)]
    path = store.match(new)
    assert (path.n_tokens, path.known_tokens) == (12, 12)
    store.insert(new)
    assert store.match(old).n_tokens == 40
    assert store.match(new).n_tokens == 32


def test_extend_says_which_blocks_somebody_else_committed(store, tokens):
    path = store.match(range(4))  # empty: two requests with the same prompt begin
    first = store.tree.extend(path, tokens(range(8)), [10, 11])
    second = store.tree.extend(path, tokens(range(12)), [20, 21, 22])
    assert first.outcomes == [Adopted(), Adopted()]
    assert second.outcomes == [DuplicateOf(10), DuplicateOf(11), Adopted()]
    assert second.n_adopted == 1
    assert store.tree.slots(second.path).tolist() == [10, 11, 22]
    assert store.tree.audit({"hbm": {10, 11, 22}}) == []


def test_a_block_that_was_already_given_with_the_same_slot_is_not_to_be_freed(store, tokens):
    path = store.match([])
    store.tree.extend(path, tokens(range(4)), [7])
    assert store.tree.extend(path, tokens(range(4)), [7]).outcomes == [Adopted()]


def test_extend_goes_on_from_a_path_that_was_split_meanwhile(store, tokens):
    path = store.insert(range(16))
    head = store.match(range(8))
    store.insert([*range(8), 50, 51, 52, 53])
    longer = store.tree.extend(path, tokens(range(16, 20)), store.take(1)).path
    forked = store.tree.extend(head, tokens([60, 61, 62, 63]), store.take(1)).path
    assert store.match(range(20)).blocks.tolist() == longer.blocks.tolist()
    assert store.match([*range(8), 60, 61, 62, 63]).blocks.tolist() == forked.blocks.tolist()
    assert store.audit() == []


def test_an_evicted_block_is_adopted_again_in_its_new_slot(store, tokens):
    store.insert(range(12))
    store.evict(2)
    path = store.match(range(12))
    assert (path.n_tokens, path.known_tokens) == (4, 12)
    again = store.tree.extend(path, tokens(range(4, 12)), [40, 41])
    assert again.outcomes == [Adopted(), Adopted()]
    assert store.tree.slots(store.match(range(12))).tolist() == [0, 40, 41]
    assert store.tree.stats()["tiers"]["hbm"]["evicted_then_wanted"] == 2
    assert store.tree.audit({"hbm": {0, 40, 41}}) == []


def test_a_path_whose_end_was_evicted_is_refused(store, tokens):
    path = store.insert(range(8))
    store.evict(1)
    with pytest.raises(StalePathError, match="8 tokens"):
        store.tree.extend(path, tokens(range(8, 12)), [9])
    with pytest.raises(StalePathError):
        store.tree.lease(path, "late")


def test_a_path_is_refused_even_when_its_block_id_is_used_again(make_store, tokens):
    store = make_store(max_ghosts=0)
    path = store.insert(range(8))
    store.evict(1)
    other = store.insert([*range(4), 90, 91, 92, 93])
    assert other.end == path.end
    with pytest.raises(StalePathError):
        store.tree.extend(path, tokens(range(8, 12)), [9])


def test_namespaces_never_meet(store, tokens):
    tree = store.tree
    store.insert(range(8))
    for other in (
        tree.namespace(b"model", b"adapter"),
        tree.namespace(b"model", salt=b"tenant"),
        tree.namespace(b"mode", b"l"),
    ):
        assert tree.match(other, tokens(range(8))).known_tokens == 0
    assert tree.match(tree.namespace(b"model"), tokens(range(8))).n_tokens == 8


def test_a_path_that_grew_by_single_blocks_has_few_edges(make_store, tokens):
    store = make_store(4)
    path = store.match([])
    for i in range(2_000):
        path = store.tree.extend(path, tokens(range(4 * i, 4 * i + 4)), [i]).path
    assert store.tree.stats()["nodes"] <= 4
    assert store.match(range(8_000)).blocks.tolist() == path.blocks.tolist()


def test_edges_join_again_when_the_forks_between_them_are_forgotten(make_store, clock):
    store = make_store(4, max_ghosts=0)
    trunk = list(range(80))
    store.insert(trunk)
    for cut in range(4, 80, 4):
        store.insert([*trunk[:cut], 1000, 1000, 1000, 1000])
    assert store.tree.stats()["nodes"] == 39
    clock.now += 1
    lease = store.tree.lease(store.match(trunk), "main")
    store.evict(100)
    assert store.tree.stats()["nodes"] == 1
    assert store.match(trunk).n_tokens == 80
    lease.release()
    assert store.audit() == []


def test_lengths_that_do_not_fit_are_refused_with_their_values(store, tokens):
    with pytest.raises(ArgumentError, match="7 bytes"):
        store.tree.match(store.space, b"1234567")
    with pytest.raises(ArgumentError, match="6 tokens for 1 slots"):
        store.tree.extend(store.match([]), tokens(range(6)), [1])
    with pytest.raises(ArgumentError, match="no tier 'disk'"):
        store.tree.resident("disk")
    with pytest.raises(ArgumentError, match="block of 0"):
        RadixTree(0)
    with pytest.raises(ArgumentError, match="9 tiers"):
        RadixTree(16, [f"t{i}" for i in range(9)])


@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 5_000])
def test_common_tokens_finds_the_first_difference_in_short_and_long_runs(size):
    a = np.arange(1, size + 1, dtype=np.int32)
    assert common_tokens(a.tobytes(), 0, 4 * size, a.tobytes(), 0, 4 * size) == size
    for at in {0, size // 2, size - 1}:
        for flip in (1, 1 << 24):  # the lowest and the highest byte of a token
            b = a.copy()
            b[at] ^= flip
            assert common_tokens(a.tobytes(), 0, 4 * size, b.tobytes(), 0, 4 * size) == at
