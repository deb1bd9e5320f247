"""The core process: a socket on one side, the core on the other, one loop between them.

Between two steps it reads what came and writes what is ready; with nothing to do it sleeps in `select`. When
the socket closes, it ends at once. `python -m engine.core.process FD`, started by engine/core/client.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.config import ServeConfig
from engine.core.core import Core
from engine.core.frames import FrameReader, frame
from engine.core.messages import Delta, pack_delta, unpack_request
from engine.errors import StartError, TrunklineError

READ_BYTES = 1 << 20
#: With requests that can't go on, the longest sleep between two looks.
WAITING_NAP_S = 0.1


class Gone(Exception):
    """The API process closed the socket."""


GONE = (Gone, BrokenPipeError, ConnectionResetError)


class CoreLoop:
    """Messages in, steps, frames out."""

    def __init__(self, sock: socket.socket, core: Core) -> None:
        self._sock = sock
        self._core = core
        self._reader = FrameReader()
        self._out = bytearray()
        self._flushed = False
        sock.setblocking(False)

    def run(self) -> None:
        """Until the other side goes away."""
        busy = False
        while True:
            self._exchange(wait=not busy)
            if self._flushed:
                continue  # the end is near: only the socket's is waited for
            if not self._core.has_work():
                self._core.tend()
                busy = False
                continue
            deltas = self._step()
            busy = bool(deltas)  # else all that is left waits for a copy, and there is nothing to compute
            if deltas:
                self._send({"op": "deltas", "deltas": [pack_delta(d) for d in deltas]})

    def _step(self) -> list[Delta]:
        try:
            return self._core.step()
        except Exception as error:
            traceback.print_exc()
            failed = self._core.fail_running(error)
            if not failed:
                raise  # nothing was running, so the next step would raise again: whoever waits is told by our end
            return failed

    def _exchange(self, *, wait: bool) -> None:
        """Read and write whatever is possible now; if `wait`, sleep until there is something, a copy has ended or
        something is due."""
        wake = None if self._flushed else self._core.wake_fd
        sources: list[socket.socket | int] = [self._sock] if wake is None else [self._sock, wake]
        nap = 0 if not wait else None if self._flushed else self._nap()
        readable, writable, _ = select.select(sources, [self._sock] if self._out else [], [], nap)
        if writable:
            self._flush()
        if self._sock not in readable:
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise Gone
        for message in self._reader.feed(data):
            self._handle(message)

    def _nap(self) -> float | None:
        """How long to sleep at most; requests that wait look again now and then, whatever they wait for."""
        due = self._core.next_due()
        return min(due or WAITING_NAP_S, WAITING_NAP_S) if self._core.has_work() else due

    def _handle(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "generate":
                self._generate(message)
            case "cancel":
                delta = self._core.cancel(message["id"])
                if delta is not None:
                    self._send({"op": "deltas", "deltas": [pack_delta(delta)]})
            case "flush":
                blocks, left = self._core.flush(message["seconds"])
                self._core.close()
                self._flushed = True
                self._send({"op": "flushed", "blocks": blocks, "left": left})
            case "stats":
                self._send({"op": "stats", "id": message["id"], "stats": self._core.stats(),
                            "audit": self._core.audit() if message.get("audit") else None})

    def _generate(self, message: dict[str, Any]) -> None:
        request = unpack_request(message)
        try:
            self._core.add(request)
        except TrunklineError as error:
            self._send({"op": "refused", "id": request.id, "error": type(error).__name__,
                        "message": error.message, "param": error.param, "code": error.code})

    def _send(self, message: dict[str, Any]) -> None:
        self._out += frame(message)
        self._flush()

    def _flush(self) -> None:
        try:
            del self._out[:self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None


def main(fd: int) -> int:
    # A terminal's Ctrl-C, or a service manager's SIGTERM, reaches the whole group; the API process decides when the
    # core ends, after it has flushed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    config, secret_check = _read_config(sock)
    threading.Thread(target=_end_with, args=(fd,), daemon=True).start()
    try:
        from engine.core.build import build_core  # here, so that a failed import is reported as well

        built = build_core(config, secret_check)
    except (StartError, MemoryError, ImportError, OSError, RuntimeError) as error:
        message = error.message if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, StartError):
            traceback.print_exc()
        with contextlib.suppress(*GONE):
            sock.sendall(frame({"op": "failed", "error": type(error).__name__, "message": message}))
        return 1
    with contextlib.suppress(*GONE):  # it may have gone while the model was loading
        sock.sendall(frame({"op": "ready", "info": asdict(built.info)}))
        # What was loaded stays for good: else a collection walks through all of it in the middle of a step.
        gc.collect()
        gc.freeze()
        CoreLoop(sock, built.core).run()
    # Without this the interpreter frees a pool of gigabytes page by page.
    sys.stderr.flush()
    os._exit(0)


def _end_with(fd: int) -> None:
    """End this process once the other side of the socket is gone: the loop does not look while a model loads, nor
    during a long step, and nothing that it could still do would reach anybody."""
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always reported
    poll.poll()
    os._exit(0)


def _read_config(sock: socket.socket) -> tuple[ServeConfig, bytes]:
    """The options, and what tells the server's secret from another one."""
    reader = FrameReader()
    while True:
        data = sock.recv(READ_BYTES)
        if not data:
            raise SystemExit(0)
        for message in reader.feed(data):
            options = dict(message["config"])
            if options.get("nvme") is not None:
                options["nvme"] = Path(options["nvme"])
            return ServeConfig(**options), message.get("secret_check", b"")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
