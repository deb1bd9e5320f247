"""Text out of a stream of tokens: whole characters only, and never a stop string. No torch.

Knows a tokenizer's bytes. Does not know requests or what is sent where: one Detokenizer and one StopStrings
belong to one reply. Both give the same text however the stream is cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Ids in, text out; what is joined equals `tokenizer.decode` of all ids at once.

    A character over several tokens comes when its last one does; bytes that can't become a character any
    more are U+FFFD, at once or, if they are the last, at flush. A push costs O(its own ids).

    `starts_text` False keeps the first space of a SentencePiece text, for a reply that continues a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, starts_text: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = starts_text and tokenizer.spelling.strips_space

    def push(self, ids: bytes) -> str:
        """The text that `ids` (int32 LE) complete; "" while a character is unfinished."""
        data = self._tokenizer.join(np.frombuffer(ids, "<i4").tolist(), self._skip_special)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)


class Stopped(NamedTuple):
    """Text to send, and the stop string that was found behind it (None: go on)."""

    emit: str
    matched: str | None


class StopStrings:
    """Cuts a stream before the first stop string: the one that is complete first, the longest of those.

    Text that could be the beginning of one is held back until it is decided; nothing else is. After a match
    everything is swallowed. Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError(
                "stop holds an empty string: it would end every reply before it began.", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> Stopped:
        """The text that can be sent now."""
        if self._matched is not None:
            return Stopped("", self._matched)
        text, self._held = self._held + text, ""
        if (found := self._first(text)) is not None:
            start, self._matched = found
            return Stopped(text[:start], self._matched)
        keep = len(text) - self._beginning(text)
        self._held = text[keep:]
        return Stopped(text[:keep], None)

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, the longest among those."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
