"""A restart: the tree of what was found on disk."""

from __future__ import annotations

import random

import pytest

from radix import RadixTree, Record, ResidenceError, block_digest, root_digest
from radix.digest import chain

ROOT = root_digest(b"model")
TIERS = ("hbm", "ram", "nvme")


@pytest.fixture
def records(tokens):
    """Records of a sequence's whole blocks, in slots and an order of writing from `first` on."""

    def make(ids, first=0, root=ROOT):
        run = tokens(ids)
        names = [root, *chain(root, run, 4)]
        return [
            Record(root, names[i + 1], names[i], i, run[16 * i : 16 * i + 16], first + i, first + i)
            for i in range(len(names) - 1)
        ]

    return make


@pytest.fixture
def store(make_store):
    return make_store(4, tiers=TIERS)


def audit(store, slots):
    return store.tree.audit({"hbm": set(), "ram": set(), "nvme": set(slots)})


def test_a_restart_finds_what_was_there_before(store, tokens):
    """From the tree's own names, in any order."""
    runs = (range(40), [*range(20), *range(50, 70)], [*range(8), 9, 9, 9, 9])
    for ids in runs:
        path = store.insert(ids)
        found = [int(block) for block in path.known if store.tree.slot("nvme", int(block)) < 0]
        store.tree.placed("nvme", found, [100 + block for block in found])
    written = {}
    for ids in runs:
        path = store.match(ids)
        names = store.tree.digests(path)
        for i, block in enumerate(path.known.tolist()):
            parent = names[i - 1] if i else store.space.root
            written[block] = (store.space.root, names[i], parent, i, store.tree.tokens(block), 100 + block, block)
    found = list(written.values())
    random.Random(1).shuffle(found)
    after = RadixTree(4, TIERS)
    assert after.recover("nvme", found) == (len(found), [], [])
    for ids in runs:
        old, new = store.match(ids), after.match(store.space, tokens(ids))
        assert after.slots(new._replace(n_blocks=len(new.known)), "nvme").tolist() == [100 + b for b in old.known]
        assert (new.n_blocks, after.reach(new)) == (0, len(old.known))
        assert after.digests(new) == store.tree.digests(old)
    assert after.audit({"nvme": {100 + block for block in written}}) == []


def test_a_path_without_forks_is_one_edge(store, records):
    run = records(range(4_000))
    random.Random(1).shuffle(run)
    assert store.tree.recover("nvme", run).blocks == 1_000
    assert store.tree.stats()["nodes"] == 1
    assert audit(store, range(1_000)) == []


def test_what_lacks_a_parent_is_an_orphan_with_all_behind_it(store, records):
    run = records(range(20))
    assert store.tree.recover("nvme", run[:2] + run[3:]) == (2, [3, 4], [])
    assert store.tree.reach(store.match(range(20))) == 2
    assert audit(store, [0, 1]) == []


def test_of_two_copies_the_one_that_was_written_last_stays(store, records):
    older, newer = records(range(8)), records(range(8), first=10)
    recovery = store.tree.recover("nvme", [newer[0], older[0], older[1], newer[1]])
    assert (recovery.blocks, recovery.orphans, sorted(recovery.duplicates)) == (2, [], [0, 1])
    assert audit(store, [10, 11]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"digest": b"x" * 16}, {"tokens": bytes(16)}, {"tokens": bytes(12)}, {"parent": b"p" * 16}, {"depth": 5},
        {"root": b"r" * 16},
    ],
)  # fmt: skip
def test_a_record_that_is_not_what_it_says_is_an_orphan_and_hides_nothing_good(store, records, change):
    run = records(range(12))
    bad = run[1]._replace(slot=90, order=90, **change)
    assert store.tree.recover("nvme", [bad, *run]) == (3, [90], [])
    assert store.tree.reach(store.match(range(12))) == 3
    assert audit(store, [0, 1, 2]) == []


def test_a_root_of_another_model_is_known_under_its_own_name_alone(store, records, tokens):
    other = root_digest(b"another model")
    recovery = store.tree.recover("nvme", [*records(range(8)), *records(range(8), first=50, root=other)])
    assert recovery == (4, [], [])
    path = store.match(range(8))
    assert [store.tree.slot("nvme", block) for block in path.known.tolist()] == [0, 1]
    path = store.tree.match(store.tree.namespace(b"another model"), tokens(range(8)))
    assert [store.tree.slot("nvme", block) for block in path.known.tolist()] == [50, 51]


def test_a_block_of_another_size_is_an_orphan_though_its_name_is_right(store, records, tokens):
    run = tokens(range(8))
    long = Record(ROOT, block_digest(ROOT, run), ROOT, 0, run, 90, 90)
    assert store.tree.recover("nvme", [long, *records(range(8))]) == (2, [90], [])


def test_a_first_block_behind_something_else_than_its_root_is_an_orphan(store, records, tokens):
    parent, run = b"p" * 16, tokens([5] * 4)
    lost = Record(ROOT, block_digest(parent, run), parent, 0, run, 90, 90)
    assert store.tree.recover("nvme", [lost, *records(range(8))]) == (2, [90], [])
    assert store.match([5] * 4).known_tokens == 0


def test_a_block_that_says_it_is_its_own_parent_is_an_orphan(store, tokens):
    """Names that go in a circle end no loop early, nor never."""
    name = block_digest(ROOT, tokens(range(4)))
    assert store.tree.recover("nvme", [Record(ROOT, name, name, 0, tokens(range(4)), 7, 1)]) == (0, [7], [])
    assert store.tree.stats()["namespaces"] == 0


def test_what_was_written_first_leaves_first_and_all_of_it_before_what_is_used_now(store, records):
    order = [3, 2_000_000_001, 2_000_000_000, 40, 41]
    store.tree.recover(
        "nvme", [records([i] * 4)[0]._replace(slot=i, order=when) for i, when in enumerate(order)]
    )
    new = store.insert([9] * 4)
    store.tree.placed("nvme", new.known.tolist(), [99])
    assert [victim.slot for victim in store.tree.victims("nvme", 9)] == [0, 3, 4, 2, 1, 99]


def test_times_before_now_keep_their_order_in_a_clock_of_a_thousand_million_seconds(clock):
    clock.now = 1e9
    tree = RadixTree(4, TIERS, clock=clock)
    times = [tree.before_now(steps) for steps in (10**9, 2, 1, 0)]
    assert sorted(set(times)) == times
    assert times[-1] < clock.now


def test_a_run_is_adopted_behind_any_block(store, tokens):
    adopt = store.tree.adopt_found
    trunk = adopt(ROOT, -1, 2, tokens(range(12)), [0, 1, 2], 5.0)
    fork = adopt(ROOT, int(trunk[0]), 2, tokens([7] * 8), [3, 4], 6.0)
    path = store.match([*range(4), *[7] * 8])
    assert path.known.tolist() == [int(trunk[0]), *fork.tolist()]
    assert store.tree.reach(store.match(range(12))) == 3
    assert audit(store, range(5)) == []
    with pytest.raises(ResidenceError, match="before anything else"):
        adopt(ROOT, -1, 2, tokens(range(4)), [9], 5.0)


def test_what_is_recovered_is_restored_like_what_was_spilled(store, records):
    store.tree.recover("nvme", records(range(12)))
    path = store.match(range(12))
    lease = store.tree.lease(path, "request 1", reach=3)
    store.tree.placed("hbm", path.known.tolist(), store.take(3))
    assert store.match(range(12)).n_tokens == 12
    lease.release()
    assert store.tree.stats()["tiers"]["hbm"]["evicted_then_wanted"] == 0
    assert store.tree.audit({"hbm": store.in_use, "nvme": {0, 1, 2}}) == []
