"""Frames on a stream socket: a 4-byte little-endian length, then that many bytes of msgpack."""

from __future__ import annotations

import struct
from typing import Any

from engine.core.messages import pack, unpack

HEADER = struct.Struct("<I")
#: A frame longer than this is a broken peer, not a message (a 1M-token prompt is 4 MB).
MAX_FRAME = 256 << 20


def frame(message: Any) -> bytes:
    body = pack(message)
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Bytes in, whole messages out, however the stream was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages: list[Any] = []
        at = 0
        while len(self._buffer) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, at)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            if len(self._buffer) - at - HEADER.size < length:
                break
            at += HEADER.size
            messages.append(unpack(bytes(self._buffer[at:at + length])))
            at += length
        del self._buffer[:at]
        return messages
