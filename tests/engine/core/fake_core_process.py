"""Stands in for `python -m engine.core.process`: no torch, and each request says in `session` what it wants.

    python fake_core_process.py LIVES FD      LIVES: one word for each start, of a file; the last one stays

    lives     ready | end (code 7) | fail (says "failed", ModelError) | fail-other | garbage | wait
    session   tokens:N  hang  die  refuse:CLASS  error  garbage  close (closes its socket and lives on)  oversized
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from engine.core.frames import HEADER, MAX_FRAME, FrameReader, frame
from engine.core.messages import Delta, Usage, pack_delta

INFO = {"model": "fake", "architecture": "none", "dtype": "float32", "device": "cpu", "vocab_size": 100,
        "max_context": 64, "block_size": 16, "pool_blocks": 8, "pool_bytes": 1024, "load_s": 0.0}
NO_FRAME = HEADER.pack(3) + b"\xc1\xc1\xc1"  # 0xc1 is the one byte that msgpack never writes


class Fake:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.running: set[str] = set()
        self.got: list[dict[str, Any]] = []
        self.cancels: list[str] = []

    def say(self, message: dict[str, Any]) -> None:
        self.sock.sendall(frame(message))

    def deltas(self, *deltas: Delta) -> None:
        self.say({"op": "deltas", "deltas": [pack_delta(d) for d in deltas]})

    def handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "generate":
            self.got.append(message)
            self.running.add(message["id"])
            word, _, rest = (message["session"] or "tokens:2").partition(":")
            getattr(self, "do_" + word.replace("-", "_"))(message["id"], rest)
        elif message["op"] == "cancel":
            self.cancels.append(message["id"])
            if message["id"] in self.running:
                self.running.discard(message["id"])
                self.deltas(Delta(message["id"], finish="cancelled", usage=Usage(3, 1)))
        elif message["op"] == "stats":
            stats = {"cancels": self.cancels, "running": sorted(self.running), "got": len(self.got)}
            self.say({"op": "stats", "id": message["id"], "stats": stats,
                      "audit": ["none"] if message["audit"] else None})

    def do_tokens(self, rid: str, n: str) -> None:
        for i in range(int(n)):
            self.deltas(Delta(rid, i.to_bytes(4, "little")))
        self.running.discard(rid)
        self.deltas(Delta(rid, finish="length", usage=Usage(3, int(n), {"hbm": 2}, {"last_token": 1})))

    def do_hang(self, rid: str, _: str) -> None:
        self.deltas(Delta(rid, b"\1\0\0\0"))

    def do_die(self, rid: str, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_refuse(self, rid: str, kind: str) -> None:
        self.running.discard(rid)
        self.say({"op": "refused", "id": rid, "error": kind, "message": "no, 70 > 64", "param": "messages",
                  "code": "context_length_exceeded" if kind == "ContextLengthError" else None})

    def do_error(self, rid: str, _: str) -> None:
        self.running.discard(rid)
        self.deltas(Delta(rid, finish="error", error="the step failed: on fire", usage=Usage(3)))

    def do_garbage(self, rid: str, _: str) -> None:
        self.sock.sendall(NO_FRAME)

    def do_oversized(self, rid: str, _: str) -> None:
        self.sock.sendall(HEADER.pack(MAX_FRAME + 1))

    def do_close(self, rid: str, _: str) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        time.sleep(600)


def begin(lives: Path) -> str:
    """This start's word; the file's others are for the starts to come."""
    word, *later = lives.read_text().split()
    if later:
        lives.write_text(" ".join(later))
    return word


def main(lives: Path, fd: int) -> int:
    sock = socket.socket(fileno=fd)
    fake, reader = Fake(sock), FrameReader()
    config = reader.feed(sock.recv(1 << 20))[0]["config"]
    match begin(lives):
        case "end":
            return 7
        case "fail":
            fake.say({"op": "failed", "error": "ModelError", "message": f"{config['model']} is cut short"})
            return 1
        case "fail-other":
            fake.say({"op": "failed", "error": "MemoryError", "message": "MemoryError: no room"})
            return 1
        case "garbage":
            sock.sendall(NO_FRAME)
        case "ready":
            fake.say({"op": "ready", "info": INFO})
    while data := sock.recv(1 << 20):
        for message in reader.feed(data):
            fake.handle(message)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
