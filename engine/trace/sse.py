"""Server-sent events, as much of them as chat completions use: bytes in, the events' data out.

Follows the WHATWG grammar (`data:` lines joined by newlines, a blank line ends an event, `:` is a comment,
lines end in LF, CR LF or CR), because servers differ in exactly these. Does not know HTTP or JSON.
"""

from __future__ import annotations

from collections.abc import Iterator

#: One line may not be longer: a server that never ends a line would fill the memory.
MAX_LINE_BYTES = 16 * 1024 * 1024


class SSEError(ValueError):
    """The stream is not one of server-sent events."""


class SSEReader:
    """Push bytes as they come, cut anywhere; each call yields the data of the events that are now whole."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []
        self._after_cr = False

    def push(self, received: bytes) -> Iterator[str]:
        if self._after_cr and received:
            received = received.removeprefix(b"\n")
            self._after_cr = False
        self._after_cr = self._after_cr or received.endswith(b"\r")
        self._rest += received
        if len(self._rest) > MAX_LINE_BYTES:
            raise SSEError(f"a line of more than {MAX_LINE_BYTES} bytes")
        *lines, rest = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            event = self._line(bytes(line))
            if event is not None:
                yield event

    def _line(self, line: bytes) -> str | None:
        if not line:
            event = "\n".join(self._data) if self._data else None
            self._data = []
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))
        return None
