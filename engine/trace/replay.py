"""Recorded sessions played against a server: which turn is sent when, and what came back.

A turn sends the transcript up to the next recorded assistant message; then the recorded message is appended,
never the generated one, so that every server is asked the same. Knows sessions and schedules. Does not know
HTTP (the client's work), reports or caches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import RequestError
from engine.text.fold import Capabilities, fold_tools
from engine.text.messages import normalise_messages, normalise_tools
from engine.trace.client import ContextReached, Reply, TurnFailed
from engine.trace.errors import TraceError
from engine.trace.formats import Session

Sleep = Callable[[float], Awaitable[None]]


class ChatClient(Protocol):
    async def chat(self, body: Mapping[str, Any]) -> Reply: ...


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to play a trace.

    `concurrency` workers each play whole sessions, one after another; with `interleave` all sessions are open
    and each next turn queues behind everybody else's. `speedup` None plays without waits, else recorded waits
    are divided by it.
    """

    concurrency: int = 1
    max_tokens: int = 32
    max_turns: int | None = None
    speedup: float | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    fold_tools: bool = False
    interleave: bool = False


@dataclass(frozen=True, slots=True)
class TurnRow:
    """An answered turn. `order` counts the requests as they were sent, whoever sent them."""

    session: int
    turn: int
    order: int
    prompt: dict[str, Any]  # messages and tools, as sent
    reply: Reply


@dataclass(slots=True)
class Replayed:
    """What a replay has seen so far; whole once `Replay.run` returns, unless it was interrupted."""

    rows: list[TurnRow] = field(default_factory=list)
    errors: int = 0
    error_messages: dict[str, int] = field(default_factory=dict)
    stopped_at_context: int = 0
    context_message: str | None = None
    wall_s: float = 0.0
    interrupted: bool = False


class Replay:
    """One replay. `on_turn` is called with what has been seen after each turn, answered or not."""

    def __init__(self, client: ChatClient, sessions: list[Session], settings: ReplaySettings, *,
                 clock: Callable[[], float], sleep: Sleep = asyncio.sleep,
                 on_turn: Callable[[Replayed], None] = lambda _: None) -> None:
        self.seen = Replayed()
        self._client = client
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._on_turn = on_turn
        self._sent = 0
        self._waiting = deque(self._play(i, s) for i, s in enumerate(sessions))

    async def run(self) -> Replayed:
        """Play everything. A cancellation (Ctrl-C) ends it early: what there is, marked interrupted."""
        started = self._clock()
        useful = min(self._settings.concurrency, len(self._waiting))
        workers = [asyncio.create_task(self._work()) for _ in range(useful)]
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            self.seen.interrupted = True
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self.seen.wall_s = self._clock() - started
        return self.seen

    def _play(self, index: int, session: Session) -> _Play:
        prompt = folded_prompt if self._settings.fold_tools else plain_prompt
        prompt(session, len(session.messages))  # what can't be folded is said now, not in the middle
        return _Play(index, session, session.turns()[: self._settings.max_turns], prompt)

    async def _work(self) -> None:
        """Take sessions until none waits. An interleaved session goes to the queue's end after each turn."""
        while self._waiting:
            play = self._waiting.popleft()
            while await self._turn(play):
                if self._settings.interleave:
                    self._waiting.append(play)
                    break

    async def _turn(self, play: _Play) -> bool:
        """Send one turn; whether the session has another."""
        if play.turn >= len(play.ends):
            return False
        await self._pause(play)
        turn, order = play.turn, self._sent
        play.turn, self._sent = turn + 1, order + 1
        prompt = play.prompt(play.session, play.ends[turn])
        try:
            reply = await self._client.chat({**prompt, **self._options()})
            self.seen.rows.append(TurnRow(play.index, turn, order, prompt, reply))
        except TurnFailed as failure:
            self._count_error(str(failure))
        except ContextReached as limit:
            self.seen.stopped_at_context += 1
            self.seen.context_message = self.seen.context_message or str(limit)
            play.turn = len(play.ends)
        self._on_turn(self.seen)
        return play.turn < len(play.ends)

    async def _pause(self, play: _Play) -> None:
        waits = play.session.wait_ms
        if self._settings.speedup is not None and waits:
            await self._sleep(waits[play.turn] / 1000 / self._settings.speedup)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "stream": True, "stream_options": {"include_usage": True},
            "temperature": self._settings.temperature, "max_tokens": self._settings.max_tokens}
        return {**options, "ignore_eos": True} if self._settings.ignore_eos else options

    def _count_error(self, message: str) -> None:
        self.seen.errors += 1
        self.seen.error_messages[message] = self.seen.error_messages.get(message, 0) + 1


Prompt = dict[str, Any]  # messages, and tools if there are any


def plain_prompt(session: Session, end: int) -> Prompt:
    """The first `end` messages of a session, as recorded."""
    messages = session.messages[:end]
    return {"messages": messages, "tools": session.tools} if session.tools else {"messages": messages}


def folded_prompt(session: Session, end: int) -> Prompt:
    """The same with tools, calls and results as text, no two user messages in a row. Raises TraceError."""
    knows_no_tools = Capabilities(user_after_user=False)
    try:
        messages, _ = fold_tools(
            normalise_messages(session.messages[:end]), normalise_tools(session.tools), knows_no_tools)
    except RequestError as error:
        raise TraceError(f"session {session.id} can't be folded to text: {error.message}") from None
    return {"messages": messages}


@dataclass(slots=True)
class _Play:
    """Where one session is: `turn` is the next to send."""

    index: int
    session: Session
    ends: list[int]
    prompt: Callable[[Session, int], Prompt]
    turn: int = 0
