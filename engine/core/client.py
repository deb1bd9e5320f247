"""The API process's side of the core: it starts the core process, talks to it, and starts it again when it dies.

No torch here. `CoreClient` hides the socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import engine.errors as errors
from engine.config import ServeConfig
from engine.core.frames import FrameReader, frame
from engine.core.messages import CoreInfo, Delta, GenerateRequest, pack_request, unpack_delta
from engine.errors import EngineError, LoadingError, RequestError, StartError, TrunklineError

log = logging.getLogger("trunkline.core")

#: What the core reads of the configuration.
CORE_FIELDS = ("model", "hbm", "dtype", "max_context", "block_size", "step_tokens", "max_running", "max_waiting",
               "threads", "device", "ram", "nvme", "nvme_size", "persist_within", "nvme_write_limit", "session_idle")
#: Seconds between a death and the next start: doubled for each death in a row, back to the first after a
#: core lived for HEALTHY_S.
RESTART_FIRST_S, RESTART_LAST_S, HEALTHY_S = 0.2, 30.0, 60.0
#: Seconds that a core gets to write what it has not persisted, before the server ends.
FLUSH_S = 20.0
#: Seconds that a core gets to end after its socket closed. It has flushed, or has nothing to save, and may be in a
#: long step.
END_S = 2.0
READ_BYTES = 1 << 20
#: How often a thread of the core looks again before it sleeps (libgomp's own choice is 100 times more or so).
SPINS = "10000"


class CoreClient:
    """One core process. `state` is "loading", "ready" or "dead" (it died, and is being started again)."""

    def __init__(self, config: ServeConfig, command: list[str] | None = None, *, secret_check: bytes = b"") -> None:
        self.state = "loading"
        self.info: CoreInfo | None = None
        self.deaths = 0
        self._command = command or [sys.executable, "-m", "engine.core.process"]
        self._config = {name: _plain(getattr(config, name)) for name in CORE_FIELDS}
        self._secret_check = secret_check
        self._streams: dict[str, asyncio.Queue[Delta | TrunklineError]] = {}
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._flushed: asyncio.Future[tuple[int, int]] | None = None
        self._started: asyncio.Future[CoreInfo] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closing = False
        self._task = asyncio.create_task(self._live())

    async def ready(self) -> CoreInfo:
        """Wait until the core has loaded the model; raises StartError if it can't."""
        return await asyncio.shield(self._started)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Deltas of one request; the last one has `finish` and `usage`. Closing the generator cancels.

        Raises RequestError, OverloadedError, LoadingError, EngineError (the core died).
        """
        self._check_ready()
        queue: asyncio.Queue[Delta | TrunklineError] = asyncio.Queue()
        self._streams[request.id] = queue
        done = False
        try:
            self._send({**pack_request(request)})
            while not done:
                item = await queue.get()
                if isinstance(item, TrunklineError):
                    done = True
                    raise item
                done = item.finish is not None
                yield item
        finally:
            self._streams.pop(request.id, None)
            if not done:
                self.cancel(request.id)

    def cancel(self, request_id: str) -> None:
        """Ask the core to stop a request; its last delta (finish "cancelled") still comes."""
        if self.state == "ready":
            self._send({"op": "cancel", "id": request_id})

    async def stats(self, *, audit: bool = False) -> dict[str, Any]:
        """The core's counters; with `audit`, also "audit": the list of broken invariants."""
        self._check_ready()
        key = uuid.uuid4().hex
        reply = asyncio.get_running_loop().create_future()
        self._replies[key] = reply
        try:
            self._send({"op": "stats", "id": key, "audit": audit})
            message = await reply
        finally:
            self._replies.pop(key, None)
        return {**message["stats"], "audit": message["audit"]} if audit else dict(message["stats"])

    async def flush(self) -> tuple[int, int] | None:
        """Have what a restart should find written: (blocks written by this, blocks that there was no time for).

        The end of the core: requests that still run get an EngineError, later ones LoadingError. None where nothing
        is persisted, or the core did not answer in FLUSH_S.
        """
        if self.state != "ready" or self.info is None or "nvme" not in self.info.tiers:
            return None
        self._send({"op": "flush", "seconds": FLUSH_S})
        self._closing = True
        self._flushed = asyncio.get_running_loop().create_future()
        for stream in self._streams.values():
            stream.put_nowait(_shutting_down())
        try:
            # The core looks at its clock; the rest is for the step that it may be in and the table of each segment.
            return await asyncio.wait_for(self._flushed, FLUSH_S + END_S)
        except (TimeoutError, EngineError):
            return None

    async def close(self) -> None:
        """End the core process. What is running gets an EngineError."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.state = "dead"
        self._fail_all(_shutting_down())  # before the core has ended: it may be in a long step
        await self._reap()
        if not self._started.done():
            self._started.cancel()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # -- inside ------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._closing:
            raise _shutting_down()
        if self.state == "loading":
            raise LoadingError("the model is still loading; try again in a few seconds")
        if self.state != "ready":
            raise LoadingError("the core process died and is being started again; try again in a few seconds")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    async def _live(self) -> None:
        """Start the core, read from it until it ends, start it again."""
        pause = RESTART_FIRST_S
        while not self._ends():
            began = time.monotonic()
            try:
                await self._run_once()
            except StartError as error:
                if not self._started.done():
                    self._started.set_exception(error)
                    self._started.exception()  # whoever waits gets it; nobody waiting is no warning
                    self.state = "dead"
                    return
                log.error("the core could not start again: %s", error)
            if self._ends():
                return
            self.state = "dead"  # before the process has ended: nothing can be sent to it any more
            self.deaths += 1
            self._fail_all(EngineError("the core process died while it worked on this request; it is being "
                                       "started again: send the request once more"))
            code = await self._reap()
            if time.monotonic() - began > HEALTHY_S:
                pause = RESTART_FIRST_S
            log.error("the core process ended with code %s; starting it again in %.1f s", code, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, RESTART_LAST_S)

    def _ends(self) -> bool:
        return self._closing  # a method: it changes while we wait

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen([*self._command, str(theirs.fileno())],
                                             pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                             env=_environment())
        except OSError as error:
            ours.close()
            raise StartError(f"the core process could not be started: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._writer = writer
        frames = FrameReader()
        try:
            self._send({"config": self._config, "secret_check": self._secret_check})
            while data := await reader.read(READ_BYTES):
                for message in frames.feed(data):
                    self._handle(message)
        except ConnectionError:
            pass
        except StartError:
            raise
        except Exception:
            log.exception("the core sent what can't be understood, so its socket is closed")
        finally:
            writer.close()
            self._writer = None
            if self._flushed is not None and not self._flushed.done():
                self._flushed.set_exception(EngineError("the core ended before it had flushed"))
        if not self._closing and not self._started.done():
            raise EngineStartError(await self._reap())

    def _handle(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "deltas":
                for raw in message["deltas"]:
                    delta = unpack_delta(raw)
                    stream = self._streams.get(delta.id)
                    if stream is None:
                        continue
                    stream.put_nowait(EngineError(delta.error or "the core failed")
                                      if delta.finish == "error" else delta)
            case "ready":
                self.info = CoreInfo(**message["info"])
                self.state = "ready"
                if not self._started.done():
                    self._started.set_result(self.info)
            case "refused":
                stream = self._streams.get(message["id"])
                if stream is not None:
                    kind = getattr(errors, message["error"], RequestError)
                    stream.put_nowait(kind(message["message"], code=message["code"], param=message["param"]))
            case "stats":
                reply = self._replies.get(message["id"])
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case "flushed":
                if self._flushed is not None and not self._flushed.done():
                    self._flushed.set_result((message["blocks"], message["left"]))
            case "failed":
                kind = getattr(errors, message["error"], StartError)
                raise kind(message["message"]) if issubclass(kind, StartError) else StartError(message["message"])

    def _fail_all(self, error: TrunklineError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    async def _reap(self) -> int | None:
        """Wait for the process; kill it if it does not end."""
        process = self._process
        if process is None:
            return None
        try:
            return await asyncio.wait_for(asyncio.to_thread(process.wait), END_S)
        except TimeoutError:
            process.kill()
            return await asyncio.to_thread(process.wait)


def _environment() -> dict[str, str]:
    """The core's environment: its threads must not spin while they wait for each other, or a neighbour on one of
    the cores (this process, say) makes a step 10 to 30 times as long (docs/benchmarks.md)."""
    env = dict(os.environ)
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", SPINS)
    return env


def _shutting_down() -> LoadingError:
    return LoadingError("the server is shutting down", code="shutting_down")


class EngineStartError(StartError):
    """The core ended before it was ready, without saying why."""

    def __init__(self, code: int | None) -> None:
        hint = " (killed: was there enough memory?)" if code == -9 else ""
        super().__init__(f"the core process ended with code {code}{hint} while it was loading; "
                         f"its last words are above")


def _plain(value: object) -> object:
    """As msgpack can carry it."""
    return str(value) if isinstance(value, Path) else value


async def start_core(config: ServeConfig, secret_check: bytes = b"") -> CoreClient:
    """Start the core process; returns at once, in state "loading". `secret_check` tells the server's secret from
    another (`engine/api/secret.py`)."""
    return CoreClient(config, secret_check=secret_check)
