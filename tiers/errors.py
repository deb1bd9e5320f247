"""The room's errors.

    TierError
    └── SlotError    a slot was asked to do what its state does not allow: a caller's bug, never a disk's fault

A failing memory or disk is not an exception but an outcome (`CopyOutcome`).
"""

from __future__ import annotations


class TierError(Exception):
    """Root of what this room raises."""


class SlotError(TierError):
    """An operation that the slot's state does not allow."""
