"""What changes a block's bytes changes the fingerprint (PITFALLS 33), and nothing else does."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling
from engine.model.fingerprint import fingerprint
from engine.model.library import ModelFiles

CONFIG = ModelConfig("LlamaForCausalLM", 64, 8, 16, 2, 2, 1, 4, 128, 1e-5, 10_000.0)
FACTS = {"torch": "2.13.0", "isa": "AVX2", "threads": "2"}


def of(files: ModelFiles, config: ModelConfig = CONFIG, dtype: str = "float32", block_size: int = 16,
       facts: dict[str, str] = FACTS) -> bytes:
    return fingerprint(files, config, dtype, block_size, deterministic_facts=facts)


@pytest.fixture
def gguf(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(1 << 16))
    return ModelFiles("m", path, "gguf")


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "hf"
    path.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json",
                 "tokenizer.json", "README.md"):
        (path / name).write_bytes(os.urandom(1000))
    return ModelFiles("org/m", path, "hf")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_it_is_32_bytes_and_the_same_each_time(gguf: ModelFiles) -> None:
    assert len(of(gguf)) == 32
    assert of(gguf) == of(gguf)


@pytest.mark.parametrize("at", [0, 40_000, -1])
def test_one_changed_byte_of_the_weights_is_another_fingerprint(gguf: ModelFiles, at: int) -> None:
    before, stat = of(gguf), gguf.path.stat()
    flip(gguf.path, at)
    os.utime(gguf.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert of(gguf) != before


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json",
                                  "tokenizer.json"])
def test_each_file_of_a_folder_that_matters_counts(folder: ModelFiles, name: str) -> None:
    before = of(folder)
    flip(folder.path / name, 500)
    assert of(folder) != before


def test_a_file_that_changes_no_token_does_not_count(folder: ModelFiles) -> None:
    before = of(folder)
    flip(folder.path / "README.md", 500)
    assert of(folder) == before


def test_shards_that_changed_places_are_another_model(folder: ModelFiles) -> None:
    before = of(folder)
    one, two = sorted(folder.path.glob("*.safetensors"))
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)
    assert of(folder) != before


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_copy_under_another_name_is_the_same_model(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    files: ModelFiles = request.getfixturevalue(kind)
    copy = tmp_path / "copied" / f"other-name{files.path.suffix}"
    copy.parent.mkdir()
    (shutil.copytree if files.path.is_dir() else shutil.copy)(files.path, copy)
    assert of(ModelFiles("another", copy, files.kind)) == of(files)


@pytest.mark.parametrize("config", [
    replace(CONFIG, rope_theta=20_000.0), replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0)),
    replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0)), replace(CONFIG, n_layers=3)])
def test_another_rope_or_shape_is_another_fingerprint(gguf: ModelFiles, config: ModelConfig) -> None:
    assert of(gguf, config) not in {of(gguf), of(gguf, replace(CONFIG, rope_scaling=RopeScaling("linear", 8.0)))}


def test_another_type_of_kv_or_size_of_block_is_another_fingerprint(gguf: ModelFiles) -> None:
    assert len({of(gguf), of(gguf, dtype="bfloat16"), of(gguf, block_size=32)}) == 3


@pytest.mark.parametrize("fact", list(FACTS))
def test_what_else_changes_bits_is_another_fingerprint(gguf: ModelFiles, fact: str) -> None:
    assert of(gguf, facts={**FACTS, fact: "another"}) != of(gguf)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.gguf: can't be read: No such file"):
        of(ModelFiles("m", tmp_path / "gone.gguf", "gguf"))
