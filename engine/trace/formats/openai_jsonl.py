"""OpenAI JSONL, a session a line: `{"messages": […], "tools"?: […], "wait_ms"?: n | […], "id"?: "…"}`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.trace.errors import TraceError
from engine.trace.formats.session import Session, check_messages, check_tools, check_waits, shown

NAME = "OpenAI messages JSONL"


def sniff(head: str) -> bool:
    return head.startswith("{")


def read(path: Path) -> Iterator[Session]:
    """Sessions in the file's order, a line at a time; blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path.name} line {number}"
            if line.strip(b" \t\r\n\xef\xbb\xbf"):
                yield _session(_parse(line, where), where, number)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        raw = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise TraceError(f"{where}: not readable: nested too deeply") from None
    except ValueError as error:     # a number of thousands of digits
        raise TraceError(f"{where}: not readable: {error}") from None
    if not isinstance(raw, dict):
        raise TraceError(f"{where}: {shown(raw)} is not an object; each line is one session")
    return raw


def _session(raw: dict[str, Any], where: str, number: int) -> Session:
    if "messages" not in raw:
        keys = ", ".join(sorted(raw)[:8]) or "none"
        raise TraceError(f"{where}, messages: missing (keys there: {keys}); each line is a session")
    name = raw.get("id", f"line-{number}")
    if not isinstance(name, str | int):
        raise TraceError(f"{where}, id: {shown(name)} is neither text nor a number")
    session = Session(str(name), check_messages(raw["messages"], where, "messages"),
                      check_tools(raw.get("tools"), where, "tools"))
    waits = check_waits(raw.get("wait_ms"), len(session.turns()), where, "wait_ms")
    return Session(session.id, session.messages, session.tools, waits)
