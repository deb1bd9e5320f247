"""A recorded session, whatever file it came from, and the checks that every format shares.

Knows the shape of OpenAI's chat messages. Does not know files, servers or tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from engine.trace.errors import TraceError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's recorded transcript.

    `wait_ms[i]` is the pause before turn i (what a tool or a person took), None if it was not recorded.
    """

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    wait_ms: list[float] | None = None

    def turns(self) -> list[int]:
        """Where each turn's prompt ends: turn i sends `messages[:turns()[i]]`.

        A turn ends before a recorded assistant message; a run of them is one reply. A transcript without any
        is one turn, the whole of it.
        """
        roles = [m["role"] for m in self.messages]
        ends = [i for i in range(1, len(roles)) if roles[i] == "assistant" and roles[i - 1] != "assistant"]
        return ends if "assistant" in roles else [len(roles)]


def check_messages(raw: object, where: str, field: str) -> list[Message]:
    """`raw` as messages, or a TraceError that names the field. `where` is the file and line or session."""
    if not isinstance(raw, list):
        raise TraceError(f"{where}, {field}: {shown(raw)} is not a list of messages")
    if not raw:
        raise TraceError(f"{where}, {field}: the list is empty; a session needs at least one message")
    for i, message in enumerate(raw):
        _check_message(message, where, f"{field}[{i}]")
    return raw


def check_tools(raw: object, where: str, field: str) -> list[dict[str, Any]] | None:
    if raw is None or raw == []:
        return None
    if not isinstance(raw, list) or not all(isinstance(t, dict) for t in raw):
        raise TraceError(f"{where}, {field}: {shown(raw)} is not a list of tools (objects)")
    return raw


def check_waits(raw: object, turns: int, where: str, field: str) -> list[float] | None:
    """A number is the pause before every turn but the first; a list has one for each turn."""
    if raw is None:
        return None
    if _is_wait(raw):
        return [0.0] + [float(raw)] * (turns - 1)  # type: ignore[arg-type]
    if not isinstance(raw, list):
        raise TraceError(f"{where}, {field}: {shown(raw)} is neither a number of ms ≥ 0 nor a list of them")
    for i, wait in enumerate(raw):
        if not _is_wait(wait):
            raise TraceError(f"{where}, {field}[{i}]: {shown(wait)} is not a number of ms ≥ 0")
    if len(raw) != turns:
        raise TraceError(
            f"{where}, {field}: {len(raw)} waits for {turns} turns; give one for each turn, or one number")
    return [float(w) for w in raw]


def shown(value: object, limit: int = 60) -> str:
    """A value as an error shows it: short, and on one line."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_wait(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _check_message(message: object, where: str, field: str) -> None:
    if not isinstance(message, dict):
        raise TraceError(f"{where}, {field}: {shown(message)} is not a message (an object with a role)")
    role = message.get("role")
    if role not in ROLES:
        raise TraceError(f"{where}, {field}.role: {shown(role)} is none of {', '.join(ROLES)}")
    _check_content(message, where, field)
    if message.get("tool_calls") is not None:
        _check_calls(message["tool_calls"], where, f"{field}.tool_calls")


def _check_content(message: Message, where: str, field: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if message["role"] == "assistant":
            return
        raise TraceError(f"{where}, {field}.content: missing; only an assistant's message may have none")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise TraceError(f"{where}, {field}.content: {shown(content)} is neither text nor a list of parts")


def _check_calls(calls: object, where: str, field: str) -> None:
    if not isinstance(calls, list):
        raise TraceError(f"{where}, {field}: {shown(calls)} is not a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TraceError(f"{where}, {field}[{i}]: {shown(call)} has no function.name")
