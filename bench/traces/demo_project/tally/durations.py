"""Durations as people write them: "90s", "1h30m", "2d"."""

import re

UNITS = {"s": 1, "m": 60, "h": 3600}
PART = re.compile(r"(\d+)([smh])")


def parse(text: str) -> int:
    """Seconds in `text`. Raises ValueError where it is no duration."""
    total = 0
    for number, unit in PART.findall(text):
        total += int(number) * UNITS[unit]
    return total


def show(seconds: int) -> str:
    """The shortest text that `parse` reads back: 5400 is "1h30m"."""
    if seconds < 0:
        raise ValueError(f"a duration can't be negative: {seconds}")
    parts = []
    for unit in ("h", "m", "s"):
        count, seconds = divmod(seconds, UNITS[unit])
        parts.append(f"{count}{unit}")
    return "".join(parts)
