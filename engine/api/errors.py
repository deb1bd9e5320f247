"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from engine.errors import EngineError, LoadingError, RequestError, TrunklineError

#: How much of a client's value an error repeats.
SHOWN_CHARS = 80
#: A core is back within seconds; a client that waits less asks in vain.
RESTART_RETRY_S = 2


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it goes out: HTTP status, body, headers."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def error_body(message: str, type: str, *, param: str | None = None,
               code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def to_reply(error: BaseException) -> ErrorReply:
    """Any exception as a reply. One that is not ours shows nothing of itself: it is in the log."""
    if not isinstance(error, TrunklineError):
        error = EngineError("internal error: the server's log says more", code="internal_error")
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(getattr(error, "retry_after_s", RESTART_RETRY_S))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(error.message, error.type, param=error.param, code=error.code)
    return ErrorReply(error.status, body, headers)


def loading_error(state: str) -> LoadingError:
    """The 503 while the core is not there; `state` is "loading" or "dead"."""
    if state == "loading":
        return LoadingError("the model is loading: try again in a moment, or ask GET /health")
    return LoadingError("the engine's core stopped and is being restarted: try again in a moment",
                        code="restarting")


def unsupported(param: str, value: object, allowed: str) -> RequestError:
    """A known parameter that can't be honoured: refused by name, never ignored."""
    return RequestError(f"{param}: {shown(value)} is not supported; {allowed}", param=param,
                        code="unsupported_parameter")


def invalid(param: str, value: object, problem: str) -> RequestError:
    return RequestError(f"{param}: {problem} (got {shown(value)})", param=param, code="invalid_value")


def shown(value: object) -> str:
    """`value` as a client wrote it, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) or len(value) < 1000 else (
            f'"{value[:SHOWN_CHARS]}')
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def from_validation(error: ValidationError, body: dict[str, Any]) -> RequestError:
    """The first of pydantic's complaints, as a person would put it."""
    first = error.errors(include_url=False)[0]
    missing = first["type"] == "missing"
    param = _param(first["loc"], body, missing=missing)
    if missing:
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Input ").replace(" after validation", "")
    return invalid(param, first["input"], message[0].lower() + message[1:])


def _param(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """`messages[0].role` from pydantic's location, less the union tags that are in it."""
    out, at = "", body
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(at, list) and part < len(at):
            out, at = f"{out}[{part}]", at[part]
        elif isinstance(part, str) and isinstance(at, dict) and (part in at or (missing and i == len(loc) - 1)):
            out, at = f"{out}.{part}" if out else part, at.get(part)
    return out
