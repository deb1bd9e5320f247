"""However a stream of ids is cut, its text is the text of all of them at once, in whole characters (PITFALLS 55)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import hf_files, sentencepiece_keys
from tokenizers import Tokenizer as Backend

from engine.errors import ModelError
from engine.model.gguf import GgufFile
from engine.model.library import resolve
from engine.text.detokenizer import Detokenizer
from engine.text.gguf_vocab import build_tokenizer
from engine.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_metadata

SENTENCEPIECE = "sentencepiece"


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == SENTENCEPIECE:
        return tokenizer_from_metadata(sentencepiece_keys(), "m")
    if name == "smollm2":
        try:
            return load_tokenizer(resolve(name, download=False))
        except ModelError:
            pytest.skip("needs smollm2 (trunkline pull smollm2)")
    return load_tokenizer(hf_files(name))


@functools.cache
def reference(name: str) -> Backend:
    """The `tokenizers` package's own decoding."""
    if name == "smollm2":
        return build_tokenizer(GgufFile(resolve(name, download=False).path).metadata, name)
    if name == SENTENCEPIECE:
        return build_tokenizer(sentencepiece_keys(), name)
    return Backend.from_file(str(hf_files(name).path / "tokenizer.json"))


@functools.cache
def fragments(name: str) -> list[int]:
    """Ids that are no whole characters by themselves: where streams go wrong."""
    tokenizer = tokenizer_of(name)
    return [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(i)]


def ids_for(name: str) -> st.SearchStrategy[list[int]]:
    anything = st.integers(0, tokenizer_of(name).vocab_size - 1)
    special = st.sampled_from(sorted(tokenizer_of(name).special_ids))
    text = st.text(max_size=8).map(lambda s: np.frombuffer(tokenizer_of(name).encode(s), "<i4").tolist())
    one = st.one_of(anything, st.sampled_from(fragments(name)), special).map(lambda i: [i])
    return st.lists(st.one_of(one, text), max_size=20).map(lambda runs: [i for run in runs for i in run])


def streamed(tokenizer: Tokenizer, ids: list[int], cut: Callable[[int], bool], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or cut(end):
            pieces.append(detokenizer.push(np.asarray(ids[start:end], "<i4").tobytes()))
            start = end
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3_1", SENTENCEPIECE])
def test_any_cut_gives_the_whole_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    assert len(fragments(name)) > 100

    @settings(max_examples=150, deadline=None)
    @given(ids=ids_for(name), cuts=st.sets(st.integers(1, 60)), skip=st.booleans())
    def check(ids: list[int], cuts: set[int], skip: bool) -> None:
        data = np.asarray(ids, "<i4").tobytes()
        whole = tokenizer.decode(data, skip)
        assert "".join(streamed(tokenizer, ids, cuts.__contains__, skip_special=skip)) == whole
        assert "".join(streamed(tokenizer, ids, lambda _: True, skip_special=skip)) == whole
        theirs = reference(name).decode(ids, skip_special_tokens=skip)
        # SentencePiece's decoder gives up a whole run of bytes for one bad one; a stream can't take text back.
        if name != SENTENCEPIECE or "\ufffd" not in theirs:
            assert whole == theirs

    check()


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3_1", SENTENCEPIECE])
@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦🏳️‍🌈", "中文字符", "e\u0301 naïve", "हिन्दी", "a😀b"])
def test_a_character_over_several_tokens_never_shows_as_a_replacement(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = np.frombuffer(tokenizer.encode(text), "<i4").tolist()
    pieces = streamed(tokenizer, ids, lambda _: True)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == reference(name).decode(ids)


def test_an_unfinished_character_is_a_replacement_at_flush_only() -> None:
    tokenizer = tokenizer_of(SENTENCEPIECE)
    detokenizer = Detokenizer(tokenizer)
    byte = {b: 3 + b for b in range(256)}
    assert detokenizer.push(np.asarray([byte[0xF0], byte[0x9F]], "<i4").tobytes()) == ""
    assert detokenizer.push(np.asarray([byte[0x98]], "<i4").tobytes()) == ""
    assert detokenizer.flush() == "\ufffd"


def test_bytes_that_can_not_become_a_character_are_replaced_at_once() -> None:
    tokenizer = tokenizer_of(SENTENCEPIECE)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(np.asarray([3 + 0xE4, 3 + 0x41], "<i4").tobytes()) == "\ufffdA"
    assert detokenizer.flush() == ""


def test_the_first_space_of_sentencepiece_is_kept_when_a_text_goes_on() -> None:
    tokenizer = tokenizer_of(SENTENCEPIECE)
    ids = tokenizer.encode("the word")
    assert Detokenizer(tokenizer).push(ids) == "the word"
    assert Detokenizer(tokenizer, starts_text=False).push(ids) == " the word"


def test_an_empty_push_gives_nothing() -> None:
    detokenizer = Detokenizer(tokenizer_of(SENTENCEPIECE))
    assert detokenizer.push(b"") == ""
    assert detokenizer.push(tokenizer_of(SENTENCEPIECE).encode("the")) == "the"
