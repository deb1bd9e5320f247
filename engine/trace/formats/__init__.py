"""Traces that can be read, a module each; which one a file is in is told from its content, never its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine.trace.errors import TraceError
from engine.trace.formats import openai_jsonl, taubench
from engine.trace.formats.session import Message, Session

__all__ = ["Message", "Session", "Trace", "load_trace"]

#: Enough to see the first keys of the first session.
_HEAD_BYTES = 64 * 1024


class _Format(Protocol):
    NAME: str

    def sniff(self, head: str) -> bool: ...
    def read(self, path: Path) -> Iterator[Session]: ...


_FORMATS: tuple[_Format, ...] = (taubench, openai_jsonl)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded sessions, in the order of their file."""

    name: str
    format: str
    sessions: list[Session]

    def turns(self, max_turns: int | None = None) -> int:
        """How many turns there are when no session plays more than `max_turns`."""
        counts = (len(s.turns()) for s in self.sessions)
        return sum(n if max_turns is None else min(n, max_turns) for n in counts)


def load_trace(path: Path, sessions: int | None = None) -> Trace:
    """The first `sessions` sessions of `path` (None: all). Raises TraceError, which names the place."""
    chosen = _detect(path, _head(path))
    found = list(islice(chosen.read(path), sessions))
    if not found:
        raise TraceError(f"{path}: no sessions in it ({chosen.NAME})")
    return Trace(path.name, chosen.NAME, found)


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    except OSError as error:
        raise TraceError(f"can't read the trace {path}: {error.strerror or error}") from None


def _detect(path: Path, head: str) -> _Format:
    if not head:
        raise TraceError(f"{path}: the file is empty")
    for candidate in _FORMATS:
        if candidate.sniff(head):
            return candidate
    known = "; ".join(f.NAME for f in _FORMATS)
    raise TraceError(f"{path}: not a trace that is known here (it begins with {head[:40]!r}). Known: {known}")
