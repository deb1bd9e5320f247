"""What the handlers need, and when they may have it.

The port is bound before the model is loaded, so a `ServerState` begins with nothing but its configuration;
`ready()` hands out the rest, or raises the 503 that says why not.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar

from engine.api.errors import loading_error
from engine.config import ServeConfig
from engine.core.messages import CoreInfo, Delta, GenerateRequest
from engine.errors import UnknownModelError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")

#: Threads that parse, render and tokenise. More than one, so that a template which runs to its time limit
#: does not hold up the next request; few, because Python runs one of them at a time anyway.
WORKERS = 4


class Core(Protocol):
    """What the API needs of `engine.core.client.CoreClient`."""

    @property
    def state(self) -> str: ...                  # "loading", "ready" or "dead" (being restarted)
    @property
    def info(self) -> CoreInfo | None: ...       # set once it is ready
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]: ...
    def cancel(self, request_id: str) -> None: ...
    async def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Text:
    """The text side of a model. Where it has no chat template, `template` is one that says so."""

    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that can answer."""

    core: Core
    info: CoreInfo
    text: Text
    names: tuple[str, ...]
    fingerprint: str
    secret: bytes = field(repr=False)
    new_id: Callable[[], str]
    now: Callable[[], float]

    def served(self, name: str | None) -> str:
        """The served model's name, for it or an alias of it (or nothing); else UnknownModelError."""
        if name is None or name in self.names:
            return self.names[0]
        raise UnknownModelError(
            f"model {name[:200]!r} is not served here; served: {', '.join(self.names)}", param="model")


@dataclass(slots=True)
class ServerState:
    """The life of one server: filled in by `server.py`, read by `app.py`."""

    config: ServeConfig
    core: Core | None = None
    text: Text | None = None
    model_name: str | None = None
    secret: bytes = field(default=b"", repr=False)
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    now: Callable[[], float] = time.time
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WORKERS, thread_name_prefix="text"))

    def core_state(self) -> str:
        """"ready", "loading" or "dead"."""
        if self.core is None or (self.text is None and self.core.state == "ready"):
            return "loading"
        return self.core.state

    def ready(self) -> Ready:
        """Everything, or LoadingError (503)."""
        state = self.core_state()
        if state != "ready" or self.core is None or self.core.info is None or self.text is None:
            raise loading_error(state)
        info = self.core.info
        return Ready(self.core, info, self.text, self.names(info), fingerprint(info), self.secret,
                     self.new_id, self.now)

    def names(self, info: CoreInfo) -> tuple[str, ...]:
        """The served name, then the aliases, each once."""
        own = self.config.served_model_name or self.model_name or info.model
        return tuple(dict.fromkeys((own, *self.config.alias)))

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Work on text, off the HTTP loop (PITFALLS 48: nothing holds the loop for more than 50 ms)."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)


def package_version() -> str:
    try:
        return version("trunkline")
    except PackageNotFoundError:       # run from a checkout that is not installed
        return "0+checkout"


def fingerprint(info: CoreInfo) -> str:
    """OpenAI's `system_fingerprint`: changes with what may change a reply."""
    told = repr((package_version(), info.model, info.architecture, info.dtype, info.device, info.vocab_size))
    return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:10]}"
