"""What each token id is in bytes, so that any run of ids is text by joining and reading UTF-8. No torch.

Knows the two ways that the models here spell bytes in a vocabulary: GPT-2's printable stand-ins (byte-level
BPE) and SentencePiece's "▁" and "<0x41>". Which one, it reads from the tokenizer's own decoder. Does not
know requests or streams.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

from engine.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes. `strips_space`: a text's first space is the mark of a beginning, not
    text.
    """

    kind: Literal["byte_level", "sentencepiece"]
    strips_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        if self.kind == "sentencepiece":
            if found := _BYTE_TOKEN.match(token):
                return bytes([int(found[1], 16)])
            return token.replace(SPACE, " ").encode("utf-8", "replace")
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:  # an added token, written as it reads
            return token.encode("utf-8", "replace")


def spelling_of(tokenizer: Tokenizer, where: str) -> Spelling:
    """Read from the tokenizer's decoder. Raises ModelError naming a decoder that is neither kind."""
    steps = _steps(tokenizer)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return Spelling("byte_level")
    strip = next((s for s in steps if s["type"] == "Strip"), None)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        return Spelling("sentencepiece", strips_space=strip is not None and strip.get("start", 0) > 0)
    if kinds == {"Metaspace"}:
        return Spelling("sentencepiece", strips_space=steps[0].get("prepend_scheme", "always") != "never")
    raise ModelError(
        f"{where} has a tokenizer whose decoder is {' + '.join(sorted(kinds)) or 'missing'}; ByteLevel and "
        "SentencePiece's (Replace, ByteFallback, Fuse, Strip) can be streamed. This model can't be served.")


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and
    up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
