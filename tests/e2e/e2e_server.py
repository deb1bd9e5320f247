"""Starts the real server as a user would, and asks it over a socket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
#: Generous bounds: they end a test that hangs, on a machine with other work too.
START_S, ANSWER_S, END_S = 180.0, 120.0, 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def environment() -> dict[str, str]:
    """Ours, less options that the user of this shell has set."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TRUNKLINE_") or k == "TRUNKLINE_CACHE"}


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "engine.cli.main", "serve", *options]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.body
        return dict(self.body["error"])

    @property
    def usage(self) -> dict[str, Any]:
        """Its counts, which add up."""
        assert self.status == 200, self.body
        usage = dict(self.body["usage"])
        cache = usage["cache"]
        assert sum(cache["cached"].values()) == usage["prompt_tokens_details"]["cached_tokens"]
        assert sum(cache["cached"].values()) + sum(cache["computed"].values()) == usage["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return usage

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Server:
    """`trunkline serve` in a process of its own; what it says goes to `log`."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command("--port", "0", *options), cwd=ROOT, env=environment(),
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self.url = ""

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def listening(self) -> Server:
        """Wait for its port."""
        self.wait(lambda: self._url() or self.process.poll() is not None)
        assert self.url, f"the server ended with {self.process.returncode}:\n{self.said()}"
        return self

    def ready(self) -> Server:
        """Wait for its model."""
        self.listening()
        self.wait(lambda: "ready after" in self.said() or self.process.poll() is not None)
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.said()}"
        return self

    def _url(self) -> bool:
        found = re.search(r"listening on (http://\S+)", self.said())
        self.url = found[1] if found else ""
        return bool(found)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def kill(self) -> None:
        """Whatever is left of it. The core ends by itself once its socket is closed."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_S)

    def core(self) -> psutil.Process:
        """The core's process."""
        (child,) = [p for p in psutil.Process(self.process.pid).children()
                    if any("engine.core.process" in part for part in p.cmdline())]
        return child

    # -- questions ---------------------------------------------------------------------------------------

    def connect(self) -> HTTPConnection:
        at = urlsplit(self.url)
        assert at.hostname is not None
        return HTTPConnection(at.hostname, at.port, timeout=ANSWER_S)

    def ask(self, path: str, body: Any = None, *, method: str | None = None) -> Answer:
        """One request on a connection of its own; `body` as JSON, or as the bytes that it is."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, body=data)
            response = connection.getresponse()
            raw = response.read()
            return Answer(response.status, dict(response.headers), json.loads(raw))
        finally:
            connection.close()

    def chat(self, content: str, **fields: Any) -> Answer:
        return self.ask(CHAT, chat_body(content, **fields))

    def complete(self, prompt: str | list[int], **fields: Any) -> Answer:
        return self.ask(COMPLETIONS, {"prompt": prompt, "temperature": 0, **fields})

    def tokens(self, text: str) -> list[int]:
        return list(self.ask("/tokenize", {"prompt": text}).body["tokens"])

    def stats(self) -> dict[str, Any]:
        return dict(self.ask("/v1/cache/stats").body)

    def available(self) -> int:
        """Slots that are empty or could be made so; with nothing running, all of them."""
        hbm = self.stats()["tiers"]["hbm"]
        return int(hbm["free"] + hbm["evictable"])

    def slots(self) -> int:
        return int(self.stats()["tiers"]["hbm"]["slots"])

    def requests(self, what: str) -> int:
        return int(self.stats()["requests"][what])

    def idle(self) -> None:
        """Wait until nothing runs or waits."""
        self.wait(lambda: self.requests("running") + self.requests("waiting") == 0)

    def wait(self, condition: Callable[[], Any], bound_s: float = START_S) -> None:
        end = time.monotonic() + bound_s
        while not condition():
            assert time.monotonic() < end, f"still waiting after {bound_s:g} s; the server said:\n{self.said()}"
            time.sleep(0.02)

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        """OpenAI's own client."""
        with OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S) as client:
            yield client

    def open(self, path: str, body: dict[str, Any]) -> OpenStream:
        """A stream that the test can leave whenever it likes."""
        connection = self.connect()
        connection.request("POST", path, body=json.dumps({**body, "stream": True}).encode())
        return OpenStream(connection)

    def together(self, asks: list[Callable[[], Any]]) -> list[Any]:
        """All at once, answers in order."""
        with ThreadPoolExecutor(len(asks)) as pool:
            return [f.result() for f in [pool.submit(ask) for ask in asks]]


@dataclass
class OpenStream:
    """Server-sent events, one at a time. `leave` closes the socket, as a client that goes away does."""

    connection: HTTPConnection
    response: HTTPResponse | None = None
    events: list[Any] = field(default_factory=list)

    def next(self) -> Any:
        """The next event's data; "[DONE]" as text; None when the server has closed the stream."""
        if self.response is None:
            self.response = self.connection.getresponse()
        while line := self.response.readline():
            if line.startswith(b"data: "):
                data = line[6:].decode().strip()
                self.events.append(data if data == "[DONE]" else json.loads(data))
                return self.events[-1]
        return None

    def read(self, n: int) -> OpenStream:
        for _ in range(n):
            assert self.next() not in (None, "[DONE]"), self.events
        return self

    def rest(self) -> list[Any]:
        while self.next() is not None:
            pass
        return self.events

    def leave(self) -> None:
        if self.connection.sock is not None:
            # Else what is unread keeps the socket open until the response is collected.
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        if self.response is not None:
            self.response.close()
        self.connection.close()


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def fresh(text: str) -> str:
    """A prompt that no test has sent before: it is cold from its first words on."""
    return f"[{uuid.uuid4().hex}] {text}"


def text_of(events: list[Any], index: int = 0) -> str:
    """The joined text of a stream, of either API."""
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"]
                   for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index)
