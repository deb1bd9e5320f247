"""The room stands alone, and its audit sees what it should see."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "radix").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", ["radix", *(f"radix.{name}" for name in MODULES)])
def test_each_module_is_imported_alone_with_nothing_but_numpy(module):
    script = (
        f"import sys; import {module}\n"
        "ours = {'engine', 'tiers', 'kernels', 'torch', 'xxhash', 'msgpack'} & set(sys.modules)\n"
        "assert not ours, ours\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True)


def _slot_twice(tree):
    tree._blocks.slot[0][1] = tree._blocks.slot[0][0]


def _hole_in_hbm(tree):
    tree._residence.leave(0, 1)


def _count_off(tree):
    tree._residence.total[0] += 1


def _leased_by_nobody(tree):
    (node,) = next(iter(tree._roots.values())).children.values()
    node.covered = 1
    tree._residence.leased[0] += 1


def _not_in_heap(tree):
    tree._residence.heaps[0]._heap.clear()


def _wrong_digest(tree):
    tree._blocks.remember_digest(0, b"x" * 16)


def _missed_where_it_is(tree):
    tree._blocks.missed[2] = 1


def _lost_id(tree):
    tree._blocks.high += 1


def _wrong_key(tree):
    root = next(iter(tree._roots.values()))
    (node,) = root.children.values()
    node.tokens = b"\x09\0\0\0" + node.tokens[4:]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_slot_twice, "two blocks"),
        (_hole_in_hbm, "prefix-closed"),
        (_count_off, "it counts"),
        (_leased_by_nobody, "leases cover 0 blocks"),
        (_not_in_heap, "not in its heap"),
        (_wrong_digest, "wrong digest"),
        (_missed_where_it_is, "missed there"),
        (_lost_id, "3 on edges and 0 free"),
        (_wrong_key, "other tokens"),
    ],
)
def test_the_audit_names_what_is_wrong(store, damage, says):
    store.insert(range(12))
    assert store.audit() == []
    damage(store.tree)
    assert any(says in violation for violation in store.audit())


def test_the_audit_counts_holes(make_store):
    store = make_store(tiers=("hbm", "nvme"))
    path = store.insert(range(8))
    store.tree.placed("nvme", [int(path.known[1])], [0])
    assert store.audit() == []
    store.tree._residence.holes[1] = 0
    assert store.audit() == ["nvme: 1 holes, it counts 0"]


def test_the_audit_compares_both_sides(store):
    store.insert(range(8))
    (missing,) = store.tree.audit({"hbm": {0}})
    assert "free there: [1]" in missing
    (leaked,) = store.tree.audit({"hbm": {0, 1, 5}})
    assert "does not hold: [5]" in leaked
