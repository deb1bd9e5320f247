"""`serve`: the life of one server.

    1. bind the port              /health says "loading" from here on
    2. find the model, start the core, read the tokenizer and the template meanwhile
    3. ready                      until SIGTERM or SIGINT
    4. stop accepting; streams end with an error event, what a restart should find is written, the core ends
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol, TextIO

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError

from engine.api.app import make_app
from engine.api.errors import error_body
from engine.api.secret import SECRET_BYTES, check_value, load_secret
from engine.api.state import Core, ServerState, Text, package_version
from engine.config import ServeConfig, banner
from engine.errors import ConfigError, ResourceError, StartError

log = logging.getLogger("trunkline.api")

#: How long replies may take to end once the core is closed, before their connections are cut.
SHUTDOWN_S = 2.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: A connection that sends no whole request for so long is closed. Longer than proxies keep theirs (60 s).
IDLE_S = 75.0


class StartedCore(Core, Protocol):
    """A `Core` with its beginning and end."""

    async def ready(self) -> object: ...
    async def flush(self) -> tuple[int, int] | None: ...
    async def close(self) -> None: ...


#: The options, and what tells the server's secret from another one.
StartCore = Callable[[ServeConfig, bytes], Awaitable[StartedCore]]
#: (what, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]
#: The model's name, and a way to load its text side.
FindModel = Callable[[ServeConfig, Progress], tuple[str, Callable[[], Text]]]


async def serve(config: ServeConfig, *, start_core: StartCore | None = None, find: FindModel | None = None,
                stop: asyncio.Event | None = None, out: TextIO | None = None) -> int:
    """Serve until a signal (or `stop`); returns the exit code. Raises StartError if it can't start."""
    out = out or sys.stdout
    stop = stop or _signalled()
    state = ServerState(config)
    began = time.monotonic()
    state.secret, notes = _secret(config)
    async with AsyncExitStack() as stack:
        stack.callback(state.pool.shutdown, wait=False, cancel_futures=True)
        runner = make_runner(make_app(state))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        port = await _bind(runner, config)
        _say(out, _head(config, port, notes))
        loading = asyncio.ensure_future(
            _load(state, stack, start_core or _start_core, find or find_model, _progress(out, stop)))
        stopping = asyncio.ensure_future(stop.wait())
        stack.callback(stopping.cancel)
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            _say(out, _ready_lines(state, time.monotonic() - began))
        await stopping
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        _say(out, ["stopping"])
        for site in list(runner.sites):
            await site.stop()
        for line in await _flush(state):
            _say(out, [line])
    return 0


def _secret(config: ServeConfig) -> tuple[bytes, list[str]]:
    """The server's secret, and what there is to say of it. Without a file that was asked for, and nowhere to keep
    one, there is one for this run: only salted requests can tell the difference, after a restart."""
    from engine.model.library import cache_dir

    if config.secret_file is not None:
        return load_secret(config.secret_file), []
    path = cache_dir() / "secret"
    try:
        return load_secret(path), []
    except ConfigError as e:
        return secrets.token_bytes(SECRET_BYTES), [
            f"{e.message}. Until then a secret is made for this run alone, and blocks under a cache_salt are not found "
            f"after a restart"]


async def _flush(state: ServerState) -> list[str]:
    """Have the core write what a restart should find; what there is to say of it."""
    core: Any = state.core
    wrote = await core.flush() if core is not None else None
    if wrote is None:
        return []
    blocks, left = wrote
    if not blocks and not left:
        return [f"nothing was left to write to {state.config.nvme}: a restart finds what is there"]
    behind = f"; there was no time for the rest of {left} conversations" if left else ""
    return [f"wrote {blocks} blocks to {state.config.nvme} that a restart finds{behind}"]


def make_runner(app: web.Application, *, idle_s: float = IDLE_S) -> web.AppRunner:
    """A client that goes away cancels its handler (PITFALLS 46); the app writes its own access log."""
    return _Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S,
                   keepalive_timeout=idle_s)


class _Connection(web.RequestHandler):
    """aiohttp's, but what is no HTTP is refused in OpenAI's shape, with a line in the log and no traceback."""

    __slots__ = ()

    def handle_error(self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        said = " ".join((message or str(exc)).split())
        if isinstance(exc, ContentEncodingError):       # it would tell the client to install a package
            said = f"{said.partition(' Please')[0]} Send gzip, deflate or plain."
        log.info("%s sent what is no HTTP: %s", request.remote, said)
        body = error_body(f"this is no HTTP request that can be read: {said}", "invalid_request_error",
                          code="invalid_http")
        response = web.json_response(body, status=status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that can't be decoded was answered; what aiohttp makes of its rest is no error of ours."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


class _Server(web.Server):
    """Makes a `_Connection` of each connection."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """aiohttp lets nobody name the class of its connections, so its server is made over again."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made.request_handler, request_factory=made.request_factory,
                       handler_cancellation=made.handler_cancellation, loop=made._loop, **made._kwargs)


async def _load(state: ServerState, stack: AsyncExitStack, start_core: StartCore, find: FindModel,
                progress: Progress) -> None:
    """Core and text side by side: the core's imports take seconds, and so may a large tokenizer."""
    state.model_name, load_text = await asyncio.to_thread(find, state.config, progress)
    core = await start_core(state.config, check_value(state.secret))
    stack.push_async_callback(core.close)
    state.core = core
    state.text, _ = await asyncio.gather(asyncio.to_thread(load_text), core.ready())


async def _start_core(config: ServeConfig, secret_check: bytes) -> StartedCore:
    from engine.core.client import start_core
    return await start_core(config, secret_check)


def find_model(config: ServeConfig, progress: Progress) -> tuple[str, Callable[[], Text]]:
    """The model's files (pulled if need be). Raises ModelError."""
    from engine.model.library import resolve
    from engine.text.template import load_template
    from engine.text.tokenizer import load_tokenizer

    files = resolve(config.model, download=True, progress=progress)

    def load() -> Text:
        tokenizer = load_tokenizer(files)
        return Text(tokenizer, load_template(files, config.chat_template, tokenizer))
    return files.name, load


def _progress(out: TextIO, stop: asyncio.Event) -> Progress:
    """Says every tenth of a download, and ends it when the server is stopped."""
    last = ("", -1)

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if stop.is_set():
            raise StartError(f"stopped while {what}")
        now = (what, 10 * done // max(total, 1))
        if now != last:
            _say(out, [f"{what}: {10 * now[1]}% of {total / 2**20:.0f} MiB"])
        last = now
    return report


def _signalled() -> asyncio.Event:
    """Set by SIGTERM or SIGINT; a second one, of either kind, ends the process at once, as a shell's user expects."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        event.set()
        for signum in signals:  # both: a supervisor's SIGTERM after a Ctrl-C must not wait for a flush
            loop.remove_signal_handler(signum)
    for signum in signals:
        loop.add_signal_handler(signum, on_signal)
    return event


async def _bind(runner: web.AppRunner, config: ServeConfig) -> int:
    """The port that is listened on; raises ResourceError with what to do."""
    where = f"{config.host} port {config.port}"
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except (socket.gaierror, ValueError) as e:  # ValueError: what can be no host's name
        raise ResourceError(f"--host {config.host}: no such address: {getattr(e, 'strerror', e)}", param="host") from e
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            problem = ("is in use: stop the server that listens there, or choose another port with --port "
                       "(0: any free one)")
        elif e.errno == errno.EACCES:
            problem = "is not allowed for this user: choose a --port of 1024 or more"
        else:
            problem = f"can't be listened on: {e.strerror or e}"
        raise ResourceError(f"{where} {problem}", param="port") from e
    return int(runner.addresses[0][1])


def _head(config: ServeConfig, port: int, more: list[str]) -> list[str]:
    host = f"[{config.host}]" if ":" in config.host else config.host
    notes = [*config.notes, *more]
    if config.host not in LOOPBACK and not config.api_key:
        notes.append(f"anyone who reaches {config.host}:{port} may use this server (--api-key prevents it)")
    return [f"Trunkline {package_version()}", *banner(config), *(f"note: {n}" for n in notes),
            f"listening on http://{host}:{port} (loading {config.model})"]


def _ready_lines(state: ServerState, seconds: float) -> list[str]:
    ready = state.ready()
    info = ready.info
    lower = "".join(f", {name} {size / 2**20:.0f} MiB = {blocks} blocks" for name, size, blocks in (
        ("RAM", info.ram_bytes, info.ram_blocks), ("NVMe", info.nvme_bytes, info.nvme_blocks)) if blocks)
    found = f" ({info.recovered_blocks} found again)" if info.recovered_blocks else ""
    return [*(f"note: {n}" for n in info.notes),
            f"ready after {seconds:.1f} s: {', '.join(ready.names)} ({info.architecture}, {info.dtype}, "
            f"{info.device}), context {info.max_context} tokens, pool {info.pool_bytes / 2**20:.0f} MiB = "
            f"{info.pool_blocks} blocks of {info.block_size} tokens{lower}{found}"]


def _say(out: TextIO, lines: list[str]) -> None:
    print("\n".join(lines), file=out, flush=True)
