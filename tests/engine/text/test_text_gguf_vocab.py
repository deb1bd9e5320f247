"""A tokenizer rebuilt from GGUF keys equals the tokenizer that the keys were taken from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from text_helpers import AWKWARD, sentencepiece_keys, shared
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from engine.errors import ModelError
from engine.model.library import ModelFiles
from engine.text.gguf_vocab import CONTROL, NORMAL, USER_DEFINED, build_tokenizer
from engine.text.tokenizer import load_tokenizer, tokenizer_from_metadata


def keys_of(path: Path, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for this tokenizer.json."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    added = {token["id"]: token for token in raw["added_tokens"]}
    tokens = {i: token for token, i in raw["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    kinds = [
        NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))], "tokenizer.ggml.token_type": kinds}


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe")])
def test_byte_level_vocabulary_gives_the_tokens_of_tokenizer_json(
    name: str, pre: str, transcripts: list[list[dict[str, Any]]]
) -> None:
    path = shared(f"tokenizers/{name}/tokenizer.json")
    ours, theirs = build_tokenizer(keys_of(path, pre), name), Backend.from_file(str(path))
    for text in AWKWARD + [m["content"] for t in transcripts for m in t if m["content"]]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


def spelled(keys: dict[str, Any], text: str, **options: Any) -> list[str]:
    ids = np.frombuffer(tokenizer_from_metadata(keys, "m").encode(text, **options), "<i4")
    return [keys["tokenizer.ggml.tokens"][i] for i in ids]


def test_sentencepiece_joins_the_best_pair_first_and_falls_back_to_bytes() -> None:
    """Worked by hand: "▁t" (score 0) is joined before "he" (-1), "th" (-10) never; "中" is three bytes."""
    keys = sentencepiece_keys()
    assert spelled(keys, "the word") == ["▁the▁word"]
    assert spelled(keys, "then") == ["▁the", "n"]
    assert spelled(keys, "whe") == ["▁w", "he"]
    assert spelled(keys, "中") == ["▁", "<0xE4>", "<0xB8>", "<0xAD>"]
    assert spelled(keys, "[INST]the<tool></s>") == ["[INST]", "▁the", "<tool>", "</s>"]
    assert spelled(keys, "the", add_special=True) == ["<s>", "▁the"]


def test_sentencepiece_without_the_added_space() -> None:
    keys = sentencepiece_keys(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert spelled(keys, "the word", add_special=True) == ["t", "he", "▁word"]
    tokenizer = tokenizer_from_metadata(keys, "m")
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_sentencepiece_texts_come_back() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece_keys(), "m")
    for text in ("the word", " the", "", "中文 é 😀\n", "  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_gives_transformers_tokens() -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    keys = sentencepiece_keys()
    names = {"tokens": "tokens", "scores": "scores", "token_type": "token_type", "model": "tokenizer_type"}
    theirs, _ = convert_gguf_tokenizer("llama", {new: keys[f"tokenizer.ggml.{old}"] for old, new in names.items()})
    ours = build_tokenizer(keys, "m")
    for text in ("the word", "then there", "whe nin  the\nword", "中文 é 😀", "the words the word"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "glm4"}, "'glm4'"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "'bert'"),
        ({"tokenizer.ggml.model": "none"}, "no vocabulary"),
        ({}, "no vocabulary"),
    ],
)
def test_what_is_not_known_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        build_tokenizer(keys, "model.gguf")


@pytest.mark.parametrize(
    ("more", "adds"),
    [({}, True), ({"tokenizer.ggml.add_bos_token": False}, False), ({"tokenizer.ggml.pre": "gpt-2"}, False)])
def test_bos_is_what_the_header_says_or_else_what_its_pre_tokenizer_implies(more: dict[str, Any], adds: bool) -> None:
    keys = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": ["a", "<s>"],
        "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": [NORMAL, CONTROL],
        "tokenizer.ggml.bos_token_id": 1, **more}
    assert (spelled(keys, "a", add_special=True) == ["<s>", "a"]) is adds


def test_a_turn_ends_at_the_chat_mark_even_if_the_header_names_the_document_s_end_only() -> None:
    keys = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "<|im_end|>"],
        "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": [NORMAL, CONTROL, CONTROL],
        "tokenizer.ggml.eos_token_id": 1}
    assert set(tokenizer_from_metadata(keys, "m").eos_ids) == {1, 2}


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("change", [
    {"tokens": 4}, {"tokens": [1, 2]}, {"tokens": ["a"] * 16, "merges": ["a b"]},
    {"tokens": [], "merges": ["a b"]}, {"merges": ["ab"]}, {"merges": ["q zz"]},
    {"merges": 1}, {"merges": [1]}, {"merges": ["a b"]}, {"model": "llama"}, {"token_type": 3},
    {"model": "llama", "scores": [0.0], "unknown_token_id": 999}, {"bos_token_id": 2**32 - 1}, {"bos_token_id": -5},
    {"bos_token_id": 1.5}, {"eos_token_id": [1]},
])
def test_a_hostile_vocabulary_is_a_model_error(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tokenizers package makes of these is a TypeError, a bare Exception, or a panic."""
    keys = {"model": "gpt2", "tokens": BYTES, "merges": [], "add_bos_token": True, **change}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    monkeypatch.setattr("engine.text.tokenizer.GgufFile", lambda path: SimpleNamespace(metadata=metadata))
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load_tokenizer(ModelFiles("m", Path("m.gguf"), "gguf"))
