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
from typing import Any

from engine.config import ServeConfig
from engine.core.core import Core
from engine.core.frames import FrameReader, frame
from engine.core.messages import Delta, pack_delta, unpack_request
from engine.errors import StartError, TrunklineError

READ_BYTES = 1 << 20


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
        sock.setblocking(False)

    def run(self) -> None:
        """Until the other side goes away."""
        while True:
            self._exchange(wait=not self._core.has_work())
            if not self._core.has_work():
                continue
            deltas = self._step()
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
        """Read and write whatever is possible now; sleep until there is something if `wait`."""
        readable, writable, _ = select.select(
            [self._sock], [self._sock] if self._out else [], [], None if wait else 0)
        if writable:
            self._flush()
        if not readable:
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise Gone
        for message in self._reader.feed(data):
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "generate":
                self._generate(message)
            case "cancel":
                delta = self._core.cancel(message["id"])
                if delta is not None:
                    self._send({"op": "deltas", "deltas": [pack_delta(delta)]})
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
    # A terminal's Ctrl-C reaches the whole group; the API process decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    config = ServeConfig(**_read_config(sock))
    threading.Thread(target=_end_with, args=(fd,), daemon=True).start()
    try:
        from engine.core.build import build_core  # here, so that a failed import is reported as well

        built = build_core(config)
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


def _read_config(sock: socket.socket) -> dict[str, Any]:
    reader = FrameReader()
    while True:
        data = sock.recv(READ_BYTES)
        if not data:
            raise SystemExit(0)
        for message in reader.feed(data):
            return dict(message["config"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
