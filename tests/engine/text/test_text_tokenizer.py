"""Token for token what Transformers gives, from tokenizer.json and from a GGUF header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_helpers import AWKWARD, hf_files, hf_reference, small_folder

from engine.errors import ModelError
from engine.model.library import ModelFiles
from engine.text.tokenizer import Tokenizer, load_tokenizer


def ids_of(data: bytes) -> list[int]:
    return [int(i) for i in np.frombuffer(data, "<i4")]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_tokenizer_json_gives_transformers_tokens(
    name: str, transcripts: list[list[dict[str, Any]]]
) -> None:
    files = hf_files(name)
    ours, theirs = load_tokenizer(files), hf_reference(files)
    texts = AWKWARD + [m["content"] for t in transcripts for m in t if m["content"]]
    assert len(texts) > 200
    for text in texts:
        assert ids_of(ours.encode(text)) == theirs.encode(text, add_special_tokens=False)
        assert ids_of(ours.encode(text, add_special=True)) == theirs.encode(text)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3"])
def test_decoding_gives_transformers_text(name: str) -> None:
    files = hf_files(name)
    ours, theirs = load_tokenizer(files), hf_reference(files)
    rng = np.random.default_rng(7)
    for skip in (True, False):
        for _ in range(60):
            ids = rng.integers(0, ours.vocab_size + 50, 40).astype("<i4")  # some beyond the vocabulary, as models are
            reference = theirs._tokenizer.decode(ids.tolist(), skip_special_tokens=skip)
            assert ours.decode(ids.tobytes(), skip_special=skip) == reference


@pytest.mark.parametrize(
    ("name", "vocab_size", "bos", "eos"),
    [("qwen3", 151_669, None, 151_645), ("llama3_1", 128_256, 128_000, 128_009)],
)
def test_named_tokens(name: str, vocab_size: int, bos: int | None, eos: int) -> None:
    tokenizer = load_tokenizer(hf_files(name))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (vocab_size, bos, (eos,))
    assert eos in tokenizer.special_ids
    assert tokenizer.special_tokens["eos_token"] == tokenizer.token_text(eos)


def test_text_marks_are_kept_and_control_tokens_left_out() -> None:
    qwen = load_tokenizer(hf_files("qwen3"))
    ids = qwen.encode("<|im_start|><tool_call>x</tool_call><|im_end|>")
    assert len(ids_of(ids)) == 5
    assert qwen.decode(ids) == "<tool_call>x</tool_call>"
    assert qwen.decode(ids, skip_special=False) == "<|im_start|><tool_call>x</tool_call><|im_end|>"


def test_smollm2_from_gguf_gives_the_published_ids(smollm2: Tokenizer) -> None:
    """Ids that SmolLM2's users have published; a digit is a token of its own, and a space before it too."""
    known = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "<|im_start|>\n<|im_end|>": [1, 198, 2],
    }
    assert {text: ids_of(smollm2.encode(text)) for text in known} == known
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids[0]) == (49_152, 1, 2)
    assert smollm2.encode("a", add_special=True) == smollm2.encode("a")  # add_bos_token is false in its header


def test_smollm2_from_gguf_gives_transformers_tokens(
    smollm2: Tokenizer, smollm2_files: ModelFiles, transcripts: list[list[dict[str, Any]]]
) -> None:
    """Transformers 5.24 reads vocabulary and merges from the GGUF, but leaves out SmolLM2's split at each digit
    ("\\n\\n1" is then three tokens); its tokenizer.json has it, so it is put in here."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = smollm2_files.path
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)._tokenizer
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in AWKWARD + [m["content"] for t in transcripts for m in t if m["content"]]:
        assert ids_of(smollm2.encode(text)) == theirs.encode(text, add_special_tokens=False).ids


def test_ids_are_int32_little_endian(smollm2: Tokenizer) -> None:
    assert smollm2.encode("\n") == b"\xc6\x00\x00\x00"


def test_a_lone_surrogate_becomes_a_replacement_character_and_a_pair_its_character(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a\ud800b") == smollm2.encode("a\ufffdb")
    assert smollm2.encode("\ud83d\ude00") == smollm2.encode("😀")


def test_ids_beyond_the_vocabulary_are_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.token_bytes(10**6) == smollm2.token_bytes(-1) == b""


@pytest.mark.parametrize(("said", "first"), [(True, "<s>"), (False, "x"), (None, "<s>")])
def test_add_bos_token_decides_over_the_post_processor(said: bool | None, first: str, tmp_path: Path) -> None:
    config = {"bos_token": "<s>", **({} if said is None else {"add_bos_token": said})}
    tokenizer = load_tokenizer(small_folder(tmp_path, config, bos_in_post_processor=said is not True))
    ids = ids_of(tokenizer.encode("xy", add_special=True))
    assert tokenizer.token_text(ids[0]) == first


def test_added_tokens_of_the_config_are_honoured(tmp_path: Path) -> None:
    added = {"5": {"content": "<tool>", "special": False}, "6": {"content": "<end>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": {"content": "<end>"}}
    tokenizer = load_tokenizer(small_folder(tmp_path, config))
    assert ids_of(tokenizer.encode("x<tool>y<end>")) == [0, 5, 1, 6]
    assert tokenizer.decode(tokenizer.encode("x<tool>y<end>")) == "x<tool>y"
    assert tokenizer.eos_ids == (6,)


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    files = small_folder(tmp_path, {"eos_token": "<s>"})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    assert load_tokenizer(files).eos_ids == (4, 2)


def test_a_missing_or_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    files = ModelFiles("m", tmp_path, "hf")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(files)


def test_a_decoder_that_cannot_be_streamed_is_named(tmp_path: Path) -> None:
    files = small_folder(tmp_path, {})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": {"type": "WordPiece", "prefix": "##",
                                                                            "cleanup": True}}))
    with pytest.raises(ModelError, match="WordPiece"):
        load_tokenizer(files)
