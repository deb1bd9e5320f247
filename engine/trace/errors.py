"""What can be wrong with a trace, said with its place."""

from __future__ import annotations

from engine.errors import StartError


class TraceError(StartError):
    """A trace can't be read: the message names the file, the line or session, and the field."""
