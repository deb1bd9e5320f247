"""What an infinite cache would have held: the yardstick of `cached_ratio`.

For each prompt, in the order sent, the longest common prefix with any earlier prompt, at token grain; the
last token of a prompt is always computed. Of all earlier prompts in lexicographic order of their bytes, the
one with the longest common prefix is a neighbour of the place where the new one belongs, so two comparisons a
prompt are enough. Prompts are token ids as int32 little-endian bytes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.trace.replay import TurnRow

_TOKEN_BYTES = 4
#: Requests to /tokenize at once: enough to keep one server busy, few enough not to swamp it.
_CONCURRENCY = 4

Tokenize = Callable[[Mapping[str, Any]], Awaitable[list[int] | None]]


@dataclass(frozen=True, slots=True)
class Ideal:
    """`ratio` is None where it can't be told, and `reason` says why. `differing` counts the prompts whose
    length by /tokenize is not what their usage said: where it is not 0, the ratio is of other prompts.
    """

    ratio: float | None
    reason: str | None = None
    differing: int = 0


def ideal_cached_tokens(prompts: Iterable[bytes]) -> int:
    """Sum over `prompts`, in the order sent, of the tokens that an infinite cache would have held.

    O(length) a prompt for comparing, O(log n) comparisons for its place.
    """
    earlier: list[bytes] = []
    total = 0
    for prompt in prompts:
        place = bisect_left(earlier, prompt)
        neighbours = earlier[max(place - 1, 0) : place + 1]
        shared = max((common_tokens(prompt, other) for other in neighbours), default=0)
        total += max(0, min(shared, len(prompt) // _TOKEN_BYTES - 1))
        if prompt not in neighbours:
            earlier.insert(place, prompt)
    return total


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix, in tokens."""
    n = min(len(a), len(b)) // _TOKEN_BYTES
    differs = np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


async def ideal_ratio(rows: Sequence[TurnRow], tokenize: Tokenize,
                      on_prompt: Callable[[int], None] = lambda _: None) -> Ideal:
    """The ideal's share of all prompt tokens of `rows`. For after the replay: the server tokenises."""
    if not rows:
        return Ideal(None, "no turn was answered")
    rows = sorted(rows, key=lambda r: r.order)
    prompts = await _tokenize_all(rows, tokenize, on_prompt)
    if prompts is None:
        return Ideal(None, "the server does not answer /tokenize for chat messages")
    differing = sum(_said_otherwise(row, prompt) for row, prompt in zip(rows, prompts, strict=True))
    total = sum(len(p) for p in prompts) // _TOKEN_BYTES
    return Ideal(ideal_cached_tokens(prompts) / total, differing=differing)


async def _tokenize_all(rows: Sequence[TurnRow], tokenize: Tokenize,
                        on_prompt: Callable[[int], None]) -> list[bytes] | None:
    prompts: list[bytes] = [b""] * len(rows)
    waiting = iter(range(len(rows)))
    absent = False
    done = 0

    async def work() -> None:
        nonlocal absent, done
        for i in waiting:
            ids = None if absent else await tokenize(rows[i].prompt)
            if ids is None:
                absent = True
                return
            prompts[i] = np.asarray(ids, "<i4").tobytes()
            done += 1
            on_prompt(done)

    await asyncio.gather(*(work() for _ in range(_CONCURRENCY)))
    return None if absent else prompts


def _said_otherwise(row: TurnRow, prompt: bytes) -> bool:
    usage = row.reply.usage
    return usage is not None and usage.prompt > 0 and usage.prompt != len(prompt) // _TOKEN_BYTES
