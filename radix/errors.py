"""What this room raises. All of it is a caller's mistake: a full tier or a miss is an outcome, never an error.

    RadixError
    ├── ArgumentError     a length, tier or number that does not fit
    ├── StalePathError    the path's end was evicted since it was matched: match again
    ├── LeaseError        a lease was used after its end
    └── ResidenceError    a report about a block that is not there, is leased, or would break the order
"""

from __future__ import annotations


class RadixError(Exception):
    """Root of this room's errors."""


class ArgumentError(RadixError):
    """An argument's length or value does not fit the tree."""


class StalePathError(RadixError):
    """The path ends in a block that is no longer in the top tier."""


class LeaseError(RadixError):
    """A lease was released twice, or used after its release."""


class ResidenceError(RadixError):
    """A report (`placed`, `dropped`, `kept`) contradicts what the tree knows."""
