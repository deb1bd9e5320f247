"""tau-bench's historical trajectories: one JSON list of `{task_id, trial, traj: [messages], …}`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from engine.trace.errors import TraceError
from engine.trace.formats.session import Session, check_messages, shown

NAME = "tau-bench JSON"


def sniff(head: str) -> bool:
    return head.startswith("[") and ('"task_id"' in head or '"traj"' in head)


def read(path: Path) -> Iterator[Session]:
    """Sessions in the file's order. The list is one JSON value, so the whole of it is read first."""
    for index, raw in enumerate(_parse(path)):
        where = f"{path.name} session {index}"
        if not isinstance(raw, dict):
            raise TraceError(f"{where}: {shown(raw)} is not an object with `traj`")
        where += f" (task_id {shown(raw.get('task_id'))})"
        if "traj" not in raw:
            raise TraceError(f"{where}, traj: missing (keys there: {', '.join(sorted(raw)[:8])})")
        messages = check_messages(raw["traj"], where, "traj")
        yield Session(f"{raw.get('task_id', index)}.{raw.get('trial', 0)}", messages)


def _parse(path: Path) -> list[object]:
    try:
        raw = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"{path.name} line {error.lineno}"
        raise TraceError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise TraceError(f"{path.name}: not readable: nested too deeply") from None
    except ValueError as error:     # a number of thousands of digits
        raise TraceError(f"{path.name}: not readable: {error}") from None
    if not isinstance(raw, list):
        raise TraceError(f"{path.name}: {shown(raw)} is not a list of sessions")
    return raw
