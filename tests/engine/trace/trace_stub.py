"""An OpenAI-compatible server without a model, in a thread of the test or as a process of its own.

Its tokens are the bytes of the rendered messages; it counts as cached what an earlier prompt shares, in blocks of 16.
What it answers, how slowly, and how it fails is up to the test: `answer(number, body) -> Answer`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BLOCK = 16


@dataclass
class Answer:
    """One reply. `cut` ends the connection after the chunks; `gate` holds the chunks back until it is set."""

    chunks: list[str] = field(default_factory=lambda: ["one", " two", " three"])
    status: int = 200
    error: Any = None
    usage: Any = "counted"
    cut: bool = False
    plain: bool = False
    raw: bytes | None = None
    gate: threading.Event | None = None


def prompt_tokens(messages: list[dict[str, Any]]) -> bytes:
    text = "".join(f"<{m['role']}>{m.get('content') or ''}{m.get('tool_calls') or ''}" for m in messages)
    return text.encode()


def shared(a: bytes, b: bytes) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Stub:
    """`with Stub() as stub:` serves at `stub.url`; `stub.bodies` are the chat requests, in the order they came."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer] = lambda number, body: Answer(),
                 *, has_tokenize: bool = True, stats: Any = None, key: str | None = None) -> None:
        self.answer = answer
        self.has_tokenize = has_tokenize
        self.stats = stats
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.came = threading.Semaphore(0)
        self.in_flight = self.most_in_flight = 0
        self._prompts: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._up = threading.Event()
        self.url = ""

    def __enter__(self) -> Stub:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(10)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was stopped before
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/cache/stats", self._stats)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def _stats(self, request: web.Request) -> web.Response:
        if self.stats is None:
            raise web.HTTPNotFound(text="no such page")
        return web.json_response(self.stats)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.has_tokenize:
            raise web.HTTPNotFound
        body = await request.json()
        self.tokenized.append(body)
        tokens = list(prompt_tokens(body["messages"]))
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.came.release()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._reply(request, body, self.answer(len(self.bodies) - 1, body))
        finally:
            self.in_flight -= 1

    async def _reply(self, request: web.Request, body: dict[str, Any], answer: Answer) -> web.StreamResponse:
        if answer.gate is not None:
            await asyncio.get_running_loop().run_in_executor(None, answer.gate.wait, 20)
        if answer.status != 200:
            return web.json_response(answer.error, status=answer.status)
        usage = self._usage(body, answer)
        if answer.plain:
            choice = {"index": 0, "finish_reason": "stop",
                      "message": {"role": "assistant", "content": "".join(answer.chunks)}}
            return web.json_response({"choices": [choice], **({"usage": usage} if usage else {})})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self._events(answer, usage):
            await response.write(piece)
        if answer.cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    def _events(self, answer: Answer, usage: Any) -> list[bytes]:
        if answer.raw is not None:
            return [answer.raw]
        deltas: list[Any] = [{"role": "assistant", "content": ""}, *({"content": c} for c in answer.chunks)]
        events: list[Any] = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        if answer.error is not None:
            events.append(answer.error)
        if not answer.cut:
            events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            if usage:
                events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(e)}\n\n".encode() for e in events]
        return lines if answer.cut else [*lines, b"data: [DONE]\n\n"]

    def _usage(self, body: dict[str, Any], answer: Answer) -> Any:
        prompt = prompt_tokens(body["messages"])
        known = max((shared(prompt, other) for other in self._prompts), default=0)
        self._prompts.append(prompt)
        if answer.usage != "counted":
            return answer.usage
        cached = min(known, len(prompt) - 1) // BLOCK * BLOCK
        return {"prompt_tokens": len(prompt), "completion_tokens": len(answer.chunks),
                "prompt_tokens_details": {"cached_tokens": cached},
                "cache": {"cached": {"hbm": cached},
                          "computed": {"never_seen": len(prompt) - cached - 1, "last_token": 1}}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--hang", action="store_true", help="never answer a chat of more than two messages")
    parser.add_argument("--fail", action="store_true", help="answer such a chat with 500")
    args, _ = parser.parse_known_args()  # sizes of tiers that it does not have
    never = threading.Event()

    def answer(number: int, body: dict[str, Any]) -> Answer:
        real = len(body["messages"]) > 2
        print(f"chat {number}", flush=True)
        if args.fail and real:
            return Answer(status=500, error={"error": {"message": "the stub is out of order"}})
        return Answer(gate=never) if args.hang and real else Answer()

    web.run_app(Stub(answer).app(), host=args.host, port=args.port, print=None, shutdown_timeout=0.1,
                handler_cancellation=True)


if __name__ == "__main__":
    main()
