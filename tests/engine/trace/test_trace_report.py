"""The report: every field from values worked out by hand, and a screen of 100 columns."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import pytest
from rich.console import Console

from engine.trace.client import Counts, Reply
from engine.trace.ideal import Ideal
from engine.trace.replay import Replayed, TurnRow
from engine.trace.report import build_report, percentiles, text_digest
from engine.trace.screen import progress, seen_note, show_report

FIELDS = [
    "requests", "errors", "stopped_at_context", "wall_s", "prompt_tokens", "cached_tokens", "cached_ratio",
    "ideal_cached_ratio", "tiers", "computed", "computed_tokens", "output_tokens", "output_tok_s", "ttft_ms",
    "ttft_first_turn_ms", "ttft_later_turns_ms", "itl_ms", "e2e_ms", "text_digest", "settings", "server",
]


def row(session: int, turn: int, usage: Counts | None, *, sent: float = 0.0, arrivals: list[float],
        finished: float, text: str = "x") -> TurnRow:
    return TurnRow(session, turn, 0, {}, Reply(sent, finished, arrivals, [text], "stop", usage))


def usage(prompt: int, completion: int, cached: int | None, computed: dict[str, int] | None = None) -> Counts:
    tiers = {} if computed is None else {"hbm": cached or 0}
    return Counts(prompt, completion, cached, tiers, computed or {})


SEEN = Replayed(rows=[
    row(0, 0, usage(100, 3, 0, {"never_seen": 99, "last_token": 1}), arrivals=[0.4, 0.5, 0.7], finished=0.8),
    row(0, 1, usage(200, 2, 96, {"never_seen": 100, "block_rounding": 3, "last_token": 1}), sent=1.0,
        arrivals=[1.1, 1.2], finished=1.2),
], errors=1, error_messages={"HTTP 500: no": 1}, stopped_at_context=1, context_message="too long", wall_s=2.0)


IDEAL = Ideal(0.33)


def report(seen: Replayed = SEEN, ideal: Ideal = IDEAL) -> dict[str, Any]:
    return build_report(seen, ideal, settings={"concurrency": 2}, server={"url": "http://h", "model": "m"})


def test_the_document_has_these_fields_and_no_others() -> None:
    assert list(report()) == FIELDS
    assert list(report(Replayed(), Ideal(None, "no turn was answered"))) == FIELDS
    json.dumps(report(), allow_nan=False)


def test_counts_are_sums_over_the_answered_turns() -> None:
    r = report()
    assert (r["requests"], r["errors"], r["stopped_at_context"], r["wall_s"]) == (3, 1, 1, 2.0)
    assert (r["prompt_tokens"], r["cached_tokens"], r["computed_tokens"]) == (300, 96, 204)
    assert (r["cached_ratio"], r["ideal_cached_ratio"]) == (0.32, 0.33)
    assert r["tiers"] == {"hbm": 96}
    assert r["computed"] == {"never_seen": 199, "last_token": 2, "block_rounding": 3}
    assert sum(r["computed"].values()) == r["computed_tokens"]
    assert (r["output_tokens"], r["output_tok_s"]) == (5, 2.5)
    assert (r["settings"], r["server"]["url"]) == ({"concurrency": 2}, "http://h")


def test_times_are_in_milliseconds_by_turn() -> None:
    r = report()
    assert r["ttft_first_turn_ms"] == {"p50": 400.0, "p90": 400.0, "p99": 400.0}
    assert r["ttft_later_turns_ms"]["p50"] == pytest.approx(100.0)
    assert r["ttft_ms"]["p50"] == pytest.approx(250.0)
    assert r["itl_ms"]["p50"] == pytest.approx(100.0)       # of 100, 200 and 100
    assert r["e2e_ms"]["p50"] == pytest.approx(500.0)       # of 800 and 200


def test_percentiles_lie_between_the_nearest_samples() -> None:
    assert percentiles([n / 1000 for n in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([0.02, 0.01]) == {"p50": 15.0, "p90": 19.0, "p99": 19.9}
    assert percentiles([0.007]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


def test_a_server_that_never_says_what_was_cached_gets_no_ratio() -> None:
    """PITFALLS 12: `cached_tokens` is a number all the same."""
    r = report(Replayed(rows=[row(0, 0, usage(10, 1, None), arrivals=[1.0], finished=1.0)], wall_s=1.0))
    assert (r["cached_tokens"], r["cached_ratio"], r["computed_tokens"]) == (0, None, 10)
    assert any("never said" in note for note in r["server"]["notes"])


def test_one_number_is_enough_to_make_the_others_zero() -> None:
    """Some servers leave the field out where nothing was cached."""
    rows = [row(0, t, usage(10, 1, c), arrivals=[1.0], finished=1.0) for t, c in enumerate((None, 5))]
    r = report(Replayed(rows=rows, wall_s=1.0))
    assert (r["cached_tokens"], r["cached_ratio"]) == (5, 0.25)
    assert not any("never said" in note for note in r["server"]["notes"])


def test_without_usage_chunks_are_counted_and_it_is_said() -> None:
    r = report(Replayed(rows=[row(0, 0, None, arrivals=[1.0, 2.0], finished=2.0)], wall_s=1.0))
    assert (r["prompt_tokens"], r["output_tokens"], r["cached_ratio"]) == (0, 2, None)
    assert any("1 of 1 answers carried no usage" in note for note in r["server"]["notes"])


def test_usage_that_does_not_add_up_is_noted() -> None:
    crooked = usage(10, 1, 4, {"never_seen": 5})
    r = report(Replayed(rows=[row(0, 0, crooked, arrivals=[1.0], finished=1.0)], wall_s=1.0))
    assert any("do not add up" in note for note in r["server"]["notes"])


def test_the_digest_is_sha256_over_session_turn_and_text() -> None:
    rows = [row(1, 0, None, arrivals=[], finished=0, text="ü"), row(0, 2, None, arrivals=[], finished=9, text="a")]
    expected = hashlib.sha256(b'[0, 2, "a"]\n[1, 0, "\\u00fc"]\n').hexdigest()
    assert text_digest(rows) == text_digest(rows[::-1]) == expected


def test_a_lone_surrogate_in_an_answer_has_a_digest() -> None:
    assert len(text_digest([row(0, 0, None, arrivals=[], finished=0, text="\ud83d")])) == 64


def screen(r: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_report(console, r)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_screen_shows_where_the_tokens_came_from() -> None:
    text = screen(report())
    for shown in ("300", "from the cache", "96", "hbm", "never_seen", "199", "infinite cache 33.0%",
                  "1 of 3 requests failed", "1 × HTTP 500: no", "1 sessions stopped"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_any_report_fits_any_screen(width: int) -> None:
    odd = report(Replayed(errors=1, error_messages={"[/red] is no markup": 1}), Ideal(None, "[bold]"))
    odd["tiers"], odd["computed"] = {"[b]tier[/]": 1}, {"a_reason_" * 9: 10**12}
    assert "[/red] is no markup" in screen(odd, width)
    assert max(map(len, screen(report(), width).splitlines())) <= width


def test_without_a_terminal_the_last_line_of_progress_is_printed() -> None:
    console = Console(file=io.StringIO(), width=100)
    with progress(console, "replaying", 3) as step:
        for done in (1, 2, 3):
            step(done, "50% [cached]")
    assert console.file.getvalue() == "replaying: 3/3  50% [cached]\n"  # type: ignore[attr-defined]


def test_a_replay_so_far_is_told_in_a_few_words() -> None:
    assert seen_note(SEEN) == "32% of 300 prompt tokens cached  1 errors"
    assert seen_note(Replayed()) == ""
