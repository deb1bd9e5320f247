"""The room's errors.

    TierError
    ├── SlotError         a slot was asked to do what its state does not allow: a caller's bug, never a disk's fault
    ├── BadRecordError    what a slot on disk holds is not the record that was asked for: a miss, dropped
    └── DirectoryError    a directory, or a cap, that can't be used: said at start
        └── DirectoryInUseError    another server owns it
    OSError
    └── NoSpaceError      the file system is full, or would be fuller than its floor allows

A move that fails raises nothing: it lands, with a reason (`tiers.Landed`).
"""

from __future__ import annotations


class TierError(Exception):
    """Root of what this room raises."""


class SlotError(TierError):
    """An operation that the slot's state does not allow."""


class BadRecordError(TierError):
    """A miss: the slot's bytes are not the record asked for. `cause` is one of a few words, for counting."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class DirectoryError(TierError):
    """A directory or a cap that can't be used; the message says why and what to do."""


class DirectoryInUseError(DirectoryError):
    """Another process holds the directory's lock."""


class NoSpaceError(OSError):
    """No room for a segment: the disk is full, or at its floor."""
