"""A real aiohttp server over a scripted core, and a real tokenizer of one token for each byte."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import numpy as np
from aiohttp import web
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.api.app import make_app
from engine.api.server import make_runner
from engine.api.state import ServerState, Text
from engine.config import ServeConfig
from engine.core.messages import CoreInfo, Delta, GenerateRequest, TokenLogprobs, Usage
from engine.text.template import CHATML, ChatTemplate
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>")
MAX_CONTEXT = 400
INFO = CoreInfo(model="bytes", architecture="fake", dtype="float32", device="cpu",
                vocab_size=256 + len(SPECIALS), max_context=MAX_CONTEXT, block_size=16, pool_blocks=64,
                pool_bytes=2**20, load_s=0.1)


def byte_tokenizer() -> Tokenizer:
    """256 tokens, one for each byte, and three special ones; BOS is <s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    bos = backend.token_to_id("<s>")
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, prefix=(bos,), eos_ids=(257,))


def make_text(template: str = CHATML) -> Text:
    tokenizer = byte_tokenizer()
    return Text(tokenizer, ChatTemplate.from_source(template, tokenizer.special_tokens))


TOKENIZER = byte_tokenizer()


def ids_of(text: str | bytes) -> bytes:
    """One id for each byte of UTF-8 (half a character as well)."""
    data = text.encode() if isinstance(text, str) else text
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(256)}
    return np.array([by_byte[bytes([b])] for b in data], "<i4").tobytes()


#: Text (one delta), seconds to wait, a delta as it is, or what is raised.
Step = str | bytes | float | Delta | Exception


@dataclass
class Reply:
    """What the core does for one request."""

    steps: Iterable[Step] = ("Hello",)
    finish: str = "stop"
    cached: int | dict[str, int] = 0    # in HBM, or by tier


class FakeCore:
    """`CoreClient` as the API sees it. Records requests, cancels and which generators have ended."""

    def __init__(self, *steps: Step, reply: Callable[[GenerateRequest], Reply] | None = None) -> None:
        self.state = "ready"
        self.info: CoreInfo | None = INFO
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self.counted: dict[str, int] = {}
        self.flushes: tuple[int, int] | None = None
        self._reply = reply or (lambda request: Reply(steps or ("Hello",)))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def flush(self) -> tuple[int, int] | None:
        return self.flushes

    async def stats(self) -> dict[str, Any]:
        return {"tiers": {"hbm": {"used": 3}}}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        reply, done = self._reply(request), False
        self.counted[request.id] = 0
        try:
            for step in reply.steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                if isinstance(step, Exception):
                    raise step
                delta = step if isinstance(step, Delta) else Delta(request.id, ids_of(step))
                self.counted[request.id] += len(delta.ids) // 4
                if request.sampling.logprobs is not None and delta.ids:
                    delta.logprobs = logprobs_of(delta.ids, request.sampling.logprobs)
                if request.id in self.cancelled:
                    break
                done = delta.finish is not None
                yield delta
                await asyncio.sleep(0)
            finish = "cancelled" if request.id in self.cancelled else reply.finish
            done = True
            usage = usage_of(request, self.counted[request.id], reply.cached)
            yield Delta(request.id, finish=finish, usage=usage)  # type: ignore[arg-type]
        finally:
            self.ended.append(request.id)
            if not done:
                self.cancel(request.id)


def usage_of(request: GenerateRequest, completion_tokens: int, cached: int | dict[str, int] = 0) -> Usage:
    prompt = len(request.ids) // 4
    tiers = {"hbm": cached} if isinstance(cached, int) else dict(cached)
    computed = {"never_seen": prompt - sum(tiers.values()) - 1, "last_token": 1}
    return Usage(prompt, completion_tokens, tiers, computed)


def logprobs_of(ids: bytes, top: int) -> list[TokenLogprobs]:
    """-0.5 for what was sampled, -1, -2, … for tokens 0, 1, …"""
    return [TokenLogprobs(t, -0.5, tuple((i, -1.0 - i) for i in range(top)))
            for t in np.frombuffer(ids, "<i4").tolist()]


@asynccontextmanager
async def serving(core: FakeCore | None = None, *, config: ServeConfig | None = None,
                  text: Text | None = None, **options: Any) -> AsyncIterator[str]:
    """The URL of a server on a free loopback port."""
    state = ServerState(config or ServeConfig(), core=core, text=text or make_text())
    runner = make_runner(make_app(state, **options))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        state.pool.shutdown()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until `condition` holds; `run` bounds it."""
    while not condition():
        await asyncio.sleep(0.001)


@dataclass
class Answer:
    status: int
    headers: Any
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose shape is checked."""
        error: dict[str, Any] = self.body["error"]
        assert self.body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        return error


async def send(url: str, method: str, path: str, body: Any = None, **options: Any) -> Answer:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    async with (aiohttp.ClientSession() as session,
                session.request(method, url + path, data=data and io.BytesIO(data), **options) as r):
        return Answer(r.status, r.headers, await r.json())


def ask(path: str, body: Any, core: FakeCore | None = None, *, method: str = "POST",
        **options: Any) -> Answer:
    """One request to a server of its own."""
    async def go() -> Answer:
        async with serving(core or FakeCore(), **options) as url:
            return await send(url, method, path, body)
    return run(go())


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


#: (the data of a stream's events, its comments, status)
Events = tuple[list[Any], list[str], int]


async def events(url: str, path: str, body: dict[str, Any]) -> Events:
    async with (aiohttp.ClientSession() as session,
                session.post(url + path, json={**body, "stream": True}) as r):
        blocks = (await r.read()).decode().split("\n\n")
    data = [b.removeprefix("data: ") for b in blocks if b.startswith("data: ")]
    return ([d if d == "[DONE]" else json.loads(d) for d in data],
            [b for b in blocks if b.startswith(":")], r.status)


def stream(path: str, body: dict[str, Any], core: FakeCore, **options: Any) -> Events:
    async def go() -> Events:
        async with serving(core, **options) as url:
            return await events(url, path, body)
    return run(go())


def chat_text(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["delta"].get("content") or "" for chunk in chunks if chunk != "[DONE]"
                   for c in chunk["choices"] if c["index"] == index)
