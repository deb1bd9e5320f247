"""The aiohttp skin: routes, keys, bodies, errors, server-sent events, the access log.

It knows HTTP and nothing of models; what it calls knows nothing of HTTP. Another skin needs this file's
functions over again and no others.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from aiohttp import web
from pydantic import BaseModel

from engine.api import openai_chat, openai_completions, openapi, plain, prepare
from engine.api.aio import with_ticks
from engine.api.errors import error_body, to_reply
from engine.api.replies import dump
from engine.api.state import Ready, ServerState, package_version
from engine.errors import AuthError, BodyTimeoutError, BodyTooLargeError, RequestError, TrunklineError

log = logging.getLogger("trunkline.api")

STATE = web.AppKey("state", ServerState)
STARTED = web.AppKey("started", int)
IDLE = web.AppKey("idle", float)

#: Silence after which a comment is sent. Proxies and SDKs give up on a stream that is silent for 10 s, and a
#: long prefill takes minutes (PITFALLS 58).
KEEP_ALIVE_S = 3.0
#: How long a client may leave a full buffer unread (aiohttp's high-water mark, 64 KiB) before its request is
#: cancelled: a reader that hangs must not hold a sequence in the core.
DRAIN_TIMEOUT_S = 30.0
#: How long a client may send nothing of its body, and how long the whole of it may take: one that stops in the middle
#: would hold its connection for ever.
BODY_IDLE_S = 30.0
BODY_S = 600.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Prepare = Callable[[Ready, bytes, bytes], prepare.Job]
Complete = Callable[[Ready, prepare.Job], Awaitable[BaseModel]]
Stream = Callable[[Ready, prepare.Job], AsyncGenerator[BaseModel, None]]


class ClientGone(ConnectionError):
    """Nobody reads what we write."""


def make_app(state: ServerState, *, keep_alive_s: float = KEEP_ALIVE_S,
             drain_timeout_s: float = DRAIN_TIMEOUT_S, body_idle_s: float = BODY_IDLE_S) -> web.Application:
    """The application; `server.make_runner` runs it."""
    app = web.Application(middlewares=[_shape_errors, _check_key], client_max_size=state.config.max_body)
    app[STATE] = state
    app[STARTED] = int(state.now())
    app[IDLE] = body_idle_s
    sse = functools.partial(_send_events, keep_alive_s=keep_alive_s, drain_timeout_s=drain_timeout_s)
    handlers: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/chat/completions"): _generation(
            prepare.prepare_chat, openai_chat.complete, openai_chat.stream, sse),
        ("POST", "/v1/completions"): _generation(
            prepare.prepare_completion, openai_completions.complete, openai_completions.stream, sse),
        ("GET", "/v1/models"): _models,
        ("GET", "/v1/models/{model}"): _model,
        ("POST", "/tokenize"): _on_text(plain.tokenize),
        ("POST", "/detokenize"): _on_text(plain.detokenize),
        ("GET", "/health"): _health,
        ("GET", "/v1/cache/stats"): _cache_stats,
        ("GET", "/openapi.json"): _openapi,
    }
    for endpoint in openapi.ENDPOINTS:
        # A model's name may be org/name.
        path = endpoint.path.replace("{model}", "{model:.+}")
        app.router.add_route(endpoint.method, path, handlers[endpoint.method, endpoint.path])
    return app


def _generation(prepare_job: Prepare, complete: Complete, stream: Stream,
                send: Callable[..., Awaitable[web.StreamResponse]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        ready = state.ready()
        job = await state.in_thread(prepare_job, ready, await _body(request), _tenant(request))
        if job.stream:
            return await send(request, stream(ready, job))
        return _json(await complete(ready, job))
    return handler


def _on_text(answer: Callable[[Ready, bytes], BaseModel]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        ready = state.ready()
        body = await _body(request)
        return await state.in_thread(lambda: _json(answer(ready, body)))
    return handler


async def _models(request: web.Request) -> web.StreamResponse:
    return _json(plain.models(request.app[STATE].ready(), request.app[STARTED]))


async def _model(request: web.Request) -> web.StreamResponse:
    return _json(plain.model(request.app[STATE].ready(), request.match_info["model"], request.app[STARTED]))


async def _health(request: web.Request) -> web.StreamResponse:
    status, body = plain.health(request.app[STATE])
    return _json(body, status=status)


async def _cache_stats(request: web.Request) -> web.StreamResponse:
    return web.json_response(await plain.cache_stats(request.app[STATE]))


async def _openapi(request: web.Request) -> web.StreamResponse:
    return web.json_response(openapi.describe(package_version()))


def _json(reply: BaseModel, *, status: int = 200) -> web.Response:
    return web.Response(body=dump(reply), status=status, content_type="application/json")


async def _body(request: web.Request) -> bytes:
    """The body; BodyTooLargeError before any of it is read, if its length is given.

    RequestError where it is not encoded as its headers say, BodyTimeoutError where it does not come.
    """
    limit = request.app[STATE].config.max_body
    if (request.content_length or 0) > limit:
        raise _too_large(str(request.content_length), limit)
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, limit)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not come: nothing of it for {request.app[IDLE]:g} s, or not the whole within {BODY_S:g} s; "
            "send all that Content-Length (or the last chunk) promises") from None
    except web.RequestPayloadError:
        encoding = request.headers.get("Content-Encoding") or request.headers.get("Transfer-Encoding")
        raise RequestError(f"the body is not {encoding or 'HTTP'}, as its headers say it is",
                           code="invalid_body") from None


async def _read(request: web.Request, limit: int) -> bytes:
    body = bytearray()
    while not request.content.at_eof():
        async with asyncio.timeout(request.app[IDLE]):
            body += await request.content.readany()
        if len(body) > limit:
            raise _too_large(f"more than {limit}", limit)
    return bytes(body)


def _too_large(size: str, limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body has {size} bytes, and the limit is {limit}: send less, or start the "
                             "server with a larger --max-body")


# ── errors, keys, the access log ─────────────────────────────────────────────────────────────────────────


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape, and a line in the log for each request."""
    start = time.monotonic()
    status = 499                                # nginx's number for "the client went away"
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as e:
        status = e.status
        return _http_error(request, e)
    except ClientGone:
        raise                                   # aiohttp closes what is left of the connection
    except Exception as e:
        status = to_reply(e).status
        return _error(e)
    finally:
        log.info("%s %s %s %d %.0f ms", request.remote, request.method, request.rel_url.raw_path, status,
                 1000 * (time.monotonic() - start))


@web.middleware
async def _check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    keys = request.app[STATE].config.api_key
    if keys and request.path not in _OPEN_PATHS:
        given = _given_key(request)
        if not _known(given, keys):
            raise AuthError("the API key is not one of this server's" if given else
                            "the API key is missing: send `Authorization: Bearer KEY`")
    return await handler(request)


def _given_key(request: web.Request) -> str:
    """The bearer token, or nothing."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def _tenant(request: web.Request) -> bytes:
    """Who asks: the API key, which was checked. Where none is asked for, what clients send as one names nobody."""
    return _given_key(request).encode() if request.app[STATE].config.api_key else b""


_OPEN_PATHS = frozenset(e.path for e in openapi.ENDPOINTS if not e.needs_key)


def _known(given: str, keys: tuple[str, ...]) -> bool:
    """Compared in constant time, all of them: how long it takes tells nothing."""
    raw = given.encode("utf-8", "surrogateescape")
    return sum(hmac.compare_digest(raw, key.encode()) for key in keys) > 0


def _error(error: Exception) -> web.Response:
    _log_if_ours(error)
    reply = to_reply(error)
    return web.json_response(reply.body, status=reply.status, headers=reply.headers)


def _log_if_ours(error: Exception) -> None:
    if not isinstance(error, TrunklineError):
        log.error("internal error", exc_info=error)


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """aiohttp's own: 404 and 405 of the router, 413 of the body."""
    code = None
    headers: dict[str, str] = {}
    if isinstance(error, web.HTTPMethodNotAllowed):
        code = "method_not_allowed"
        headers["Allow"] = allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not allowed on {request.path}; allowed: {allowed}"
    elif error.status == 404:
        code = "unknown_url"
        message = f"Unknown request URL: {request.method} {request.path}. See GET /openapi.json."
    else:
        message = error.reason
    body = error_body(message, "invalid_request_error" if error.status < 500 else "server_error", code=code)
    return web.json_response(body, status=error.status, headers=headers)


# ── server-sent events ───────────────────────────────────────────────────────────────────────────────────


async def _send_events(request: web.Request, chunks: AsyncGenerator[BaseModel, None], *, keep_alive_s: float,
                       drain_timeout_s: float) -> web.StreamResponse:
    """Write `chunks` as events.

    The status goes out with the first event or comment, so an error that comes before it has a status of its
    own; a later one is an event. Whatever ends this function closes `chunks`, and so the request in the core.
    """
    response = web.StreamResponse(headers={
        "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no"})
    write = functools.partial(_write, request, response, drain_timeout_s=drain_timeout_s)
    async with aclosing(with_ticks(chunks, keep_alive_s)) as events:
        try:
            async for chunk in events:
                await write(b": keep-alive\n\n" if chunk is None else b"data: " + dump(chunk) + b"\n\n")
            await write(b"data: [DONE]\n\n")
        except ClientGone:
            raise
        except Exception as e:
            if not response.prepared:
                raise
            _log_if_ours(e)
            await write(b"data: " + json.dumps(to_reply(e).body).encode() + b"\n\n")
    await response.write_eof()
    return response


async def _write(request: web.Request, response: web.StreamResponse, data: bytes, *,
                 drain_timeout_s: float) -> None:
    """Raises ClientGone where nobody reads; the connection is closed then."""
    try:
        async with asyncio.timeout(drain_timeout_s):
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)
    except (TimeoutError, ConnectionError) as e:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGone from e
