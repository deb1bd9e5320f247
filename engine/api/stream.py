"""From the core's deltas to a choice's text: whole characters, without its stop strings, with its logprobs.

    ids ──► Detokenizer ──► StopStrings ──► Piece
            whole UTF-8     holds back what may begin a stop string

When a stop string has matched, the core is told to cancel, and its last delta is awaited all the same: the
usage is in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from engine.api.aio import merge
from engine.api.prepare import Job
from engine.api.replies import Finish, UsageSum
from engine.api.state import Core, Ready
from engine.core.messages import Delta, GenerateRequest, TokenLogprobs, Usage
from engine.errors import EngineError
from engine.text.detokenizer import Detokenizer, StopStrings
from engine.text.tokenizer import Tokenizer


class TokenAt(NamedTuple):
    """One sampled token, and where its text begins in the choice's text, in characters."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class Piece:
    """What one step added to one choice. `finish`, `usage` and `completion_tokens` come with the last."""

    choice: int
    text: str = ""
    tokens: list[TokenAt] | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    completion_tokens: int = 0


def pieces(ready: Ready, job: Job) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices of a job, as they come. Closing it cancels what still runs."""
    return merge(
        follow(ready.core, request, i, ChoiceText(ready.text.tokenizer, job, request))
        for i, request in enumerate(job.requests()))


@dataclass(slots=True)
class Whole:
    """Every choice of a job, ended."""

    texts: list[str]
    tokens: list[list[TokenAt]]
    finish: list[Finish]
    usage: UsageSum


async def collect(ready: Ready, job: Job) -> Whole:
    """All pieces of a job, joined."""
    count = len(job.prompts) * job.n
    texts: list[list[str]] = [[] for _ in range(count)]
    whole = Whole([], [[] for _ in range(count)], ["stop"] * count, UsageSum())
    async with aclosing(pieces(ready, job)) as source:
        async for piece in source:
            texts[piece.choice].append(piece.text)
            whole.tokens[piece.choice] += piece.tokens or []
            whole.finish[piece.choice] = piece.finish or "stop"
            add_usage(whole.usage, job, piece)
    whole.texts = ["".join(parts) for parts in texts]
    return whole


def add_usage(total: UsageSum, job: Job, piece: Piece) -> None:
    """The usage of a last piece; nothing for the others."""
    if piece.usage is not None:
        total.add(piece.usage, completion_tokens=piece.completion_tokens,
                  first_of_prompt=piece.choice % job.n == 0)


async def follow(core: Core, request: GenerateRequest, choice: int,
                 text: ChoiceText) -> AsyncGenerator[Piece, None]:
    """The pieces of one choice; raises EngineError if the core gives up on it."""
    async with aclosing(core.generate(request)) as deltas:
        async for delta in deltas:
            matched_before = text.matched
            piece = Piece(choice, text.push(delta))
            piece.tokens = text.take_tokens()
            if delta.finish is not None:
                _finish(piece, delta, text)
                yield piece
                return
            if text.matched and not matched_before:
                core.cancel(request.id)
            if piece.text or piece.tokens:
                yield piece
    raise EngineError("the engine's core ended the request without a word", code="internal_error")


def _finish(piece: Piece, delta: Delta, text: ChoiceText) -> None:
    if delta.finish == "error" or (delta.finish == "cancelled" and not text.matched):
        raise EngineError(delta.error or "the server cancelled the request", code="internal_error")
    if delta.usage is None:
        raise EngineError("the engine's core sent no usage", code="internal_error")
    piece.finish = "length" if delta.finish == "length" and not text.matched else "stop"
    piece.usage = delta.usage
    piece.completion_tokens = text.consumed if text.matched else delta.usage.completion_tokens


class ChoiceText:
    """The text of one choice as it grows.

    With stop strings or logprobs the tokens are taken one by one: where a stop string matched, the count of
    tokens and the logprobs end with the token that completed it, however many the step brought.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job, request: GenerateRequest) -> None:
        self.matched = False
        self.consumed = 0
        self._decode = Detokenizer(tokenizer, starts_text=job.starts_text)
        self._stops = StopStrings(job.stops) if job.stops else None
        self._one_by_one = bool(job.stops) or request.sampling.logprobs is not None
        self._tokens = _HeldTokens() if request.sampling.logprobs is not None else None

    def push(self, delta: Delta) -> str:
        """The text that `delta` adds, and that no stop string can begin in. Nothing after a match."""
        step = 4 if self._one_by_one else max(len(delta.ids), 1)
        out = []
        for i in range(0, len(delta.ids), step):
            if self.matched:
                break
            out.append(self._token(delta, i, step))
        if delta.finish is not None and not self.matched:
            out.append(self._end())
        return "".join(out)

    def take_tokens(self) -> list[TokenAt] | None:
        """The tokens whose text has gone out since the last call; None without logprobs."""
        return self._tokens.take(all=self.matched) if self._tokens is not None else None

    def _token(self, delta: Delta, at: int, step: int) -> str:
        ids = delta.ids[at:at + step]
        self.consumed += len(ids) // 4
        text = self._decode.push(ids)
        emit = self._stop(text)
        if self._tokens is not None and delta.logprobs:
            self._tokens.add(delta.logprobs[at // 4], len(text))
            self._tokens.emitted(len(emit))
        return emit

    def _end(self) -> str:
        emit = self._stop(self._decode.flush())
        if self._stops is not None and not self.matched:
            emit += self._stops.flush()
        if self._tokens is not None:
            self._tokens.emitted(len(emit), last=not self.matched)
        return emit

    def _stop(self, text: str) -> str:
        if self._stops is None:
            return text
        emit, matched = self._stops.push(text)
        self.matched = matched is not None
        return emit


class _HeldTokens:
    """Tokens wait until their text has gone out, so that a stop string does not leak through logprobs.

        text    [ gone out ......... ][ held back ... ]
        tokens  t0   t1   t2      t3 ─┼─    t4

    t3 goes out with the rest of its text; if a stop string matches there, t3 goes out (it gave some text) and
    t4 does not.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[TokenAt, int]] = deque()     # with the end of its text
        self._pushed = self._emitted = 0
        self._last = False

    def add(self, logprobs: TokenLogprobs, chars: int) -> None:
        start, self._pushed = self._pushed, self._pushed + chars
        self._held.append((TokenAt(logprobs, start), self._pushed))

    def emitted(self, chars: int, *, last: bool = False) -> None:
        self._emitted += chars
        self._last = self._last or last

    def take(self, *, all: bool) -> list[TokenAt]:
        """Those whose text is out; when there will be no more (`all`), also the one that is out in part."""
        out = []
        while self._held:
            token, end = self._held[0]
            if not (self._last or end <= self._emitted or (all and token.offset < self._emitted)):
                break
            out.append(self._held.popleft()[0])
        return out
