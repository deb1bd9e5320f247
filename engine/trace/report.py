"""A replay as numbers: the document that `--json` writes and the screen shows.

Knows what each field means. Does not know how it is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.trace.ideal import Ideal
from engine.trace.replay import Replayed, TurnRow

Report = dict[str, Any]

#: Distinct error messages kept; the count in `errors` is always whole.
_MESSAGES = 20


def build_report(seen: Replayed, ideal: Ideal, *, settings: Mapping[str, Any],
                 server: Mapping[str, Any]) -> Report:
    """The report of one replay.

    `requests` counts turns that were answered or failed; a turn refused for its length only ends its session
    (`stopped_at_context`). Token and time fields are of answered turns. `cached_ratio` is None where no
    answer told what was cached; `cached_tokens` is then 0. Times are in milliseconds.
    """
    rows = seen.rows
    usages = [u for r in rows if (u := r.reply.usage) is not None]
    prompt = sum(u.prompt for u in usages)
    cached = sum(u.cached or 0 for u in usages)
    told = any(u.cached is not None for u in usages)
    output = sum(_output_tokens(r) for r in rows)
    return {
        "requests": len(rows) + seen.errors,
        "errors": seen.errors,
        "stopped_at_context": seen.stopped_at_context,
        "wall_s": round(seen.wall_s, 3),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_ratio": _ratio(cached, prompt) if told else None,
        "ideal_cached_ratio": None if ideal.ratio is None else round(ideal.ratio, 5),
        "tiers": _summed(u.tiers for u in usages),
        "computed": _summed(u.computed for u in usages),
        "computed_tokens": prompt - cached,
        "output_tokens": output,
        "output_tok_s": round(output / seen.wall_s, 2) if seen.wall_s > 0 else None,
        "ttft_ms": percentiles([r.reply.ttft_s for r in rows]),
        "ttft_first_turn_ms": percentiles([r.reply.ttft_s for r in rows if r.turn == 0]),
        "ttft_later_turns_ms": percentiles([r.reply.ttft_s for r in rows if r.turn > 0]),
        "itl_ms": percentiles([gap for r in rows for gap in r.reply.gaps_s]),
        "e2e_ms": percentiles([r.reply.finished - r.reply.sent for r in rows]),
        "text_digest": text_digest(rows),
        "settings": dict(settings),
        "server": {**server, "notes": _notes(seen, ideal, told), "error_messages": _messages(seen)},
    }


def text_digest(rows: Iterable[TurnRow]) -> str:
    """SHA-256 over (session, turn, output text) of the answered turns, sorted: timing plays no part."""
    digest = hashlib.sha256()
    for row in sorted(rows, key=lambda r: (r.session, r.turn)):
        digest.update(json.dumps([row.session, row.turn, row.reply.text]).encode("ascii") + b"\n")
    return digest.hexdigest()


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 in milliseconds, interpolated linearly between the nearest two; None of no samples."""
    ordered = sorted(seconds)
    return {f"p{p}": round(_at(ordered, p / 100) * 1000, 3) if ordered else None for p in (50, 90, 99)}


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _output_tokens(row: TurnRow) -> int:
    """As the server counted; where it did not, a chunk of content is taken for a token."""
    usage = row.reply.usage
    said = usage.completion if usage is not None else None
    return len(row.reply.arrivals) if said is None else said


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 5) if whole else None


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _messages(seen: Replayed) -> dict[str, int]:
    return dict(list(seen.error_messages.items())[:_MESSAGES])


def _notes(seen: Replayed, ideal: Ideal, told: bool) -> list[str]:
    """What a reader must know to read the numbers right."""
    usages = [r.reply.usage for r in seen.rows]
    unsaid = sum(u is None for u in usages)
    crooked = sum(u is not None and not u.adds_up for u in usages)
    notes = {
        "interrupted: this is what had been answered by then": seen.interrupted,
        f"{unsaid} of {len(usages)} answers carried no usage; their prompts are not counted": unsaid,
        "the server never said how many prompt tokens were cached; cached_tokens is 0 for want of a number":
            usages and not told,
        f"in {crooked} answers cached and computed do not add up to the prompt": crooked,
        f"no ideal_cached_ratio: {ideal.reason}": ideal.ratio is None,
        f"{ideal.differing} prompts are longer or shorter by /tokenize than by usage: the ideal is of others":
            ideal.differing,
        f"stopped at the context limit: {seen.context_message}": seen.stopped_at_context,
    }
    return [note for note, holds in notes.items() if holds]
