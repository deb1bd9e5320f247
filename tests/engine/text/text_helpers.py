"""Where the shared data lies, Transformers as a reference, and two tokenizers small enough to work out by hand."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.model.library import ModelFiles
from engine.text.gguf_vocab import BYTE, CONTROL, NORMAL, USER_DEFINED

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"


def shared(name: str) -> Path:
    if not (path := SHARED / name).exists():
        pytest.skip(f"needs ../shared/data/{name}: not found")
    return path


def hf_files(name: str) -> ModelFiles:
    return ModelFiles(name, shared(f"tokenizers/{name}"), "hf")


@functools.lru_cache(maxsize=3)
def hf_reference(files: ModelFiles) -> Any:
    """Transformers' own tokenizer of the same files; not to be changed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(files.path))


#: Where tokenizers part company: digits, spaces, line breaks, contractions, scripts, combining marks, joined emoji.
AWKWARD = [
    "", " ", "   ", "\n", "\n\n", " \n\t\r\n  x", "a", "Hello world! 123", "3.14159 1,000,000 2024-05-15T15:00:00",
    "I'm can't WE'LL they'd've", "naïve café e\u0301 A\u030a", "中文字符和日本語のテキスト", "한국어 عربى עברית हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇳🇴", "def f(x):\n    return {**x, 'a': [1, 2]}\n\n\n", "\u00a0\u2003\u200b\ufeff", "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>", "<|begin_of_text|><|eot_id|>", "<tool_call>\n{}\n</tool_call>", "<think>",
    "<|im_st",
]


def small_folder(folder: Path, config: dict[str, Any], *, bos_in_post_processor: bool = False) -> ModelFiles:
    """A byte-level tokenizer of x, y, xy, z and <s>."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE({"x": 0, "y": 1, "xz": 2, "z": 3}, [("x", "z")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    if bos_in_post_processor:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 4)])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("small", folder, "hf")


#: A SentencePiece vocabulary of the usual order: specials, 256 bytes, pieces by falling score.
PIECES = ["▁t", "he", "▁the", "er", "in", "▁w", "ord", "▁word", "or", "rd", "th", "▁the▁word",
          "▁", "t", "h", "e", "r", "i", "n", "w", "o", "d", "é", "▁▁"]


def sentencepiece_keys(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "[INST]", "<tool>"]
    first = 3 + 256
    scores = [0.0] * first + [-float(n) for n in range(len(PIECES))] + [0.0, 0.0]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), CONTROL, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, **more}
