"""A client of any OpenAI-compatible server, which notes when each piece of an answer came.

Knows HTTP and the API's shapes. Does not know traces or schedules. Times are seconds of the injected clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from engine.errors import StartError
from engine.trace.sse import SSEError, SSEReader

Clock = Callable[[], float]

#: How servers say that a prompt is too long: OpenAI's and our code, llama-server's type, vLLM's sentence.
_CONTEXT_CODES = ("context_length_exceeded", "exceed_context_size_error")
_CONTEXT_WORDS = re.compile(
    r"(maximum|available|model's) context (length|size)|context window", re.IGNORECASE)

#: Idle connections are dropped before any usual server does (5 s), so none is met half closed.
_KEEPALIVE_S = 2.0
#: Of a body that is not what was asked for, this much is shown.
_EXCERPT = 200
#: A body may not be longer: a server that never ends one would fill the memory.
_MAX_BODY_BYTES = 64 * 1024 * 1024
#: Seconds for an answer that needs no model: a server that hangs is told soon, whatever --timeout says.
_ASIDE_S = 60.0


class TurnFailed(Exception):
    """One turn has no complete answer; the message is for a person."""


class ContextReached(Exception):
    """The server refused the prompt for its length."""


@dataclass(slots=True)
class Counts:
    """A reply's usage. `cached` is None where the server said nothing of it; 0 is a number that was said."""

    prompt: int = 0
    completion: int | None = None
    cached: int | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    @property
    def adds_up(self) -> bool:
        """Whether cached and computed, where they were given, are the prompt."""
        if not self.tiers and not self.computed:
            return True
        cached = sum(self.tiers.values())
        return cached + sum(self.computed.values()) == self.prompt and self.cached in (None, cached)


@dataclass(slots=True)
class Reply:
    """One whole answer. `arrivals` are the times of the chunks that carried content."""

    sent: float
    finished: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Counts | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def ttft_s(self) -> float:
        return (self.arrivals[0] if self.arrivals else self.finished) - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client:
    """One server, one model. Use as `async with Client(…) as client`."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0,
                 clock: Clock = time.perf_counter) -> None:
        self.url = base_url(url)
        self.model = ""
        self._clock = clock
        self._timeout_s = timeout_s
        self._aside = aiohttp.ClientTimeout(total=min(timeout_s, _ASIDE_S))
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise StartError("--api-key has characters that can't be in an HTTP header")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers={**self._headers, "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "Client is used outside `async with`"
        return self._session

    async def first_model(self) -> str:
        """The first of /v1/models. Raises StartError where there is no such server."""
        body = await self.get_json("/v1/models")
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise StartError(f"{self.url}/v1/models lists no model; name one with --model") from None

    async def get_json(self, path: str) -> Any:
        """GET a JSON document. Raises StartError, which says what to do."""
        url = self.url + path
        try:
            async with self._http.get(url, timeout=self._aside) as response:
                raw = await _read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise StartError(f"no answer from {url} ({_reason(error)}); is the server running? "
                             "Start ours with `trunkline serve`, or give another --url") from None
        if response.status == 401:
            raise StartError(f"{url} answered 401: it wants a key; give it with --api-key")
        if response.status != 200:
            raise StartError(f"{url} answered {response.status}: {_error_message(raw)}")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise StartError(f"{url} did not answer with JSON but with {_excerpt(raw)!r}") from None

    async def healthy(self) -> bool:
        """Whether /health answers 200: it is there, and its model is loaded."""
        try:
            async with self._http.get(self.url + "/health", timeout=self._aside) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """Token ids of a chat prompt, by vLLM's form of /tokenize; None where the server has none."""
        request = {"model": self.model, "add_generation_prompt": True, **body}
        try:
            async with self._http.post(self.url + "/tokenize", data=_dump(request), timeout=self._aside) as response:
                found = json.loads(await _read(response)) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError, RecursionError):
            return None
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < 2**31 for t in tokens):
            return None
        return tokens or None

    async def chat(self, body: Mapping[str, Any]) -> Reply:
        """One streamed chat completion. Raises TurnFailed or ContextReached."""
        try:
            data = _dump({"model": self.model, **body})
        except RecursionError:
            raise TurnFailed("the recorded messages are nested too deeply to be sent") from None
        reply = Reply(sent=self._clock())
        try:
            async with self._http.post(self.url + "/v1/chat/completions", data=data) as response:
                await self._receive(response, reply)
        except (aiohttp.ClientError, OSError, SSEError) as error:
            if isinstance(error, TimeoutError):
                raise TurnFailed(f"no complete answer within {self._timeout_s:g} s (--timeout)") from None
            raise TurnFailed(_reason(error)) from None
        reply.finished = self._clock()
        if reply.finish_reason is None:
            raise TurnFailed("the stream ended in the middle of an answer (no finish_reason)")
        return reply

    async def _receive(self, response: aiohttp.ClientResponse, reply: Reply) -> None:
        if response.status != 200:
            raise _refusal(response.status, await _read(response))
        if response.content_type == "application/json":  # a server that does not stream
            self._take(await _read(response), reply, "message")
            return
        reader = SSEReader()
        async for received in response.content.iter_any():
            for event in reader.push(received):
                if event == "[DONE]":
                    return
                self._take(event, reply, "delta")

    def _take(self, raw: str | bytes, reply: Reply, key: str) -> None:
        """Add one chunk (or one unstreamed answer) to `reply`."""
        try:
            chunk = json.loads(raw)
        except (ValueError, RecursionError):
            raise TurnFailed(f"a chunk of the stream is not JSON: {_excerpt(raw)!r}") from None
        if not isinstance(chunk, dict):
            raise TurnFailed(f"a chunk of the stream is not an object: {_excerpt(raw)!r}")
        if chunk.get("error"):
            raise _refusal(200, raw)
        if isinstance(chunk.get("usage"), dict):
            reply.usage = counts(chunk["usage"])
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        text = delta_text(choices[0].get(key))
        if text:
            reply.arrivals.append(self._clock())
            reply.parts.append(text)
        reply.finish_reason = choices[0].get("finish_reason") or reply.finish_reason


def base_url(url: str) -> str:
    """`url` with a scheme and without `/v1` or a slash at its end: what paths are added to."""
    if "://" not in url:
        url = "http://" + url
    if not url.startswith(("http://", "https://")):
        raise StartError(f"--url {url}: only http:// and https:// can be used")
    if not _is_address(url):
        raise StartError(f"--url {url!r}: not a server's address, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _is_address(url: str) -> bool:
    """A host, a port that can be, and nothing behind the path."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and not parts.query and not parts.fragment and (
            url.isprintable() and " " not in url)
    except ValueError:      # a port beyond 65535, half a bracket
        return False


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, or ClientError where it is endless."""
    body = bytearray()
    async for received in response.content.iter_any():
        body += received
        if len(body) > _MAX_BODY_BYTES:
            raise _TooMuch
    return bytes(body)


class _TooMuch(aiohttp.ClientError):
    def __str__(self) -> str:
        return f"a body of more than {_MAX_BODY_BYTES >> 20} MiB"


def delta_text(delta: object) -> str:
    """What of a delta counts as output: content, reasoning, and tool calls' names and arguments."""
    if not isinstance(delta, dict):
        return ""
    parts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [function.get("name"), function.get("arguments")]
    return "".join(p for p in parts if isinstance(p, str))


def counts(usage: Mapping[str, Any]) -> Counts:
    """A usage object as numbers. What is missing, null or of another type was not said."""
    details = usage.get("prompt_tokens_details")
    cache = usage.get("cache")
    cache = cache if isinstance(cache, dict) else {}
    tiers, computed = _ints(cache.get("cached")), _ints(cache.get("computed"))
    cached = _int(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None and tiers:
        cached = sum(tiers.values())
    prompt, completion = _int(usage.get("prompt_tokens")), _int(usage.get("completion_tokens"))
    return Counts(prompt or 0, completion, cached, tiers, computed)


def _int(value: object) -> int | None:
    """A count, or None: a server that says -1, or more than a 64-bit number, has said nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _ints(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    return {str(k): v for k, v in value.items() if _int(v) is not None}


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode("ascii")


def _refusal(status: int, raw: str | bytes) -> TurnFailed | ContextReached:
    try:
        error = json.loads(raw)
        error = error.get("error", error) if isinstance(error, dict) else {}
    except (ValueError, RecursionError):
        error = {}
    message = _error_message(raw)
    named = isinstance(error, dict) and any(error.get(key) in _CONTEXT_CODES for key in ("code", "type"))
    if named or (status < 500 and _CONTEXT_WORDS.search(message)):
        return ContextReached(message)
    return TurnFailed(f"HTTP {status}: {message}" if status != 200 else f"in the stream: {message}")


def _error_message(raw: str | bytes) -> str:
    """The sentence in an error body, whichever of the usual shapes it has."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return _excerpt(raw) or "(an empty body)"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return found if isinstance(found, str) else _excerpt(raw)


def _excerpt(raw: str | bytes) -> str:
    text = raw.decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw
    text = " ".join(text.split())
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"


def _os_reason(error: OSError) -> str:
    """asyncio's text for a refused connection names the call; the error's number names the reason."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _reason(error: BaseException) -> str:
    """An exception in words. aiohttp's often have an empty text, or one that only repeats the address."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't connect: {_os_reason(error.os_error)}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "the server closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was cut in the middle of an answer"
    if isinstance(error, asyncio.TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.TooManyRedirects):
        return "it redirects without end"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"what it answers is not HTTP: {_excerpt(error.message)}"
    return str(error) or type(error).__name__
