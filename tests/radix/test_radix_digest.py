"""Names of blocks outside the process."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys

from radix import block_digest, root_digest
from radix.digest import chain

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_root_hashes_each_field_behind_its_length():
    by_hand = hashlib.sha256(
        b"\x02\0\0\0\0\0\0\0" + b"fp" + b"\0\0\0\0\0\0\0\0" + b"" + b"\x04\0\0\0\0\0\0\0" + b"salt"
    ).digest()[:16]
    assert root_digest(b"fp", b"", b"salt") == by_hand
    assert by_hand.hex() == "3b7ce6fd5011954a9f27709ae08c0d46"


def test_fields_do_not_run_into_each_other():
    roots = {root_digest(*fields) for fields in [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"", b"", b"abc")]}
    assert len(roots) == 4


def test_a_block_hashes_its_parent_and_its_tokens():
    parent = bytes(range(16))
    tokens = b"\x01\0\0\0\x02\0\0\0"  # 1 and 2, int32 little-endian
    by_hand = hashlib.sha256(bytes.fromhex("000102030405060708090a0b0c0d0e0f0100000002000000")).digest()[:16]
    assert block_digest(parent, tokens) == by_hand
    assert by_hand.hex() == "820da1eb5a4ab2b046a95701432d2d65"


def test_a_chain_names_each_whole_block(tokens):
    root = root_digest(b"model")
    first = block_digest(root, tokens([1, 2]))
    assert list(chain(root, tokens([1, 2, 3, 4, 5]), 2)) == [first, block_digest(first, tokens([3, 4]))]


def test_the_tree_names_its_blocks_as_the_chain_does_and_remembers(store, tokens, monkeypatch):
    store.insert([*range(40)])
    store.insert([*range(20), *range(50, 60)])  # a split
    path = store.match(range(40))
    expected = list(chain(store.space.root, tokens(range(40)), 4))
    assert store.tree.digests(path) == expected
    monkeypatch.setattr("radix.tree.block_digest", None)  # a second computation would fail
    assert store.tree.digests(store.match(range(40))) == expected
    assert store.audit() == []


def test_a_block_id_that_is_used_again_gets_a_new_name(make_store):
    store = make_store(max_ghosts=0)
    old = store.tree.digests(store.insert(range(8)))
    store.evict(1)
    new = store.tree.digests(store.insert([*range(4), 9, 9, 9, 9]))
    assert new[0] == old[0]
    assert new[1] != old[1]
    assert store.audit() == []


def test_two_processes_with_different_hash_seeds_agree():
    """PITFALLS 35."""
    script = (
        "import struct; from radix import RadixTree\n"
        "tree = RadixTree(4); space = tree.namespace(b'model', b'adapter', b'salt')\n"
        "run = struct.pack('<40i', *range(40))\n"
        "path = tree.extend(tree.match(space, run), run, range(10)).path\n"
        "print(hash('x'), space.root.hex() + b''.join(tree.digests(path)).hex())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert outputs[0][0] != outputs[1][0], "the seeds did not take"
    assert outputs[0][1] == outputs[1][1]
    assert len(outputs[0][1]) == 11 * 32
