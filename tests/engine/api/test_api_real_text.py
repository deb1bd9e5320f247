"""The same paths with SmolLM2's own tokenizer and template, where the model is in the cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from api_harness import FakeCore, Reply, ask, chat, chat_text, stream

from engine.api.server import find_model
from engine.api.state import Text
from engine.config import ServeConfig
from engine.core.messages import Delta, GenerateRequest
from engine.errors import ModelError
from engine.model import library

CHAT = "/v1/chat/completions"


@functools.cache
def load() -> Text:
    try:
        library.resolve("smollm2", download=False)
    except ModelError as error:
        pytest.skip(f"needs smollm2: {error.message}")
    return find_model(ServeConfig(), lambda *progress: None)[1]()


@pytest.fixture
def text() -> Text:
    return load()


def saying(text: Text, words: str, each: int = 1) -> FakeCore:
    """A core whose deltas bring `each` tokens of `words`."""
    ids = text.tokenizer.encode(words)

    def reply(request: GenerateRequest) -> Reply:
        return Reply([Delta(request.id, ids[i:i + 4 * each]) for i in range(0, len(ids), 4 * each)])
    return FakeCore(reply=reply)


@pytest.mark.parametrize("each", [1, 2, 5])
def test_characters_over_several_tokens_come_whole(text: Text, each: int) -> None:
    words = "naïve → 日本語 👩‍👩‍👧 done"
    assert len(text.tokenizer.encode("👩‍👩‍👧")) // 4 > 3
    chunks, _, _ = stream(CHAT, chat(), saying(text, words, each), text=text)
    assert chat_text(chunks) == words
    assert all("\ufffd" not in (c["choices"][0]["delta"].get("content") or "") for c in chunks[:-1])


@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize(("stop", "shown"), [
    ("語 👩", "naïve → 日本"), ("Observation:", "naïve → 日本語 👩 Obs"), ("bs", "naïve → 日本語 👩 O")])
def test_stop_strings_cut_across_tokens(text: Text, each: int, stop: str, shown: str) -> None:
    core = saying(text, "naïve → 日本語 👩 Obs", each)
    chunks, _, _ = stream(CHAT, chat(stop=[stop]), core, text=text)
    assert chat_text(chunks) == shown


def test_the_prompt_is_the_model_s_own_template(text: Text) -> None:
    core = FakeCore()
    body: dict[str, Any] = {"messages": [{"role": "system", "content": "Be brief."},
                                         {"role": "user", "content": "Hi"}]}
    ask(CHAT, body, core, text=text)
    ids = core.requests[0].ids
    assert text.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # SmolLM2's ids of <|im_start|> and <|im_end|>, as its model card's tokenizer_config.json has them.
    assert [i for i in np.frombuffer(ids, "<i4").tolist() if i in (1, 2)] == [1, 2, 1, 2, 1]
