"""`trunkline stats`: counters that nobody here has heard of are shown all the same."""

from __future__ import annotations

import copy
import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trace_stub import Stub

from engine.cli.background import free_port
from engine.cli.main import main
from engine.trace.facts import flat, human_bytes, humanised, show_facts

ROOT = Path(__file__).resolve().parents[3]

STATS: dict[str, Any] = {
    "uptime_s": 12.5,
    "tiers": {"hbm": {"slots": 2184, "used": 1200, "bytes": 1073741824, "evictions": 0},
              "ram": {"slots": 10, "used": 1, "pinned": True}},
    "tree": {"nodes": 17, "blocks": 1200, "audit": None},
    "requests": {"running": 1, "waiting": 0, "finished": 59},
    "tokens": {"prompt": 138443, "cached": {"hbm": 122000}, "computed": {"never_seen": 15000}, "generated": 1416},
    "speeds": {"prefill_tok_s": 712.4, "decode_step_ms": 21.07},
    "what is new": {"deep": {"deeper": {"deepest": {"x": 1}}}, "list": [1, 2], "[red]": "[/red]"},
}


def drawn(facts: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(show_facts(facts, before))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_every_counter_is_shown_with_its_unit() -> None:
    text = drawn(STATS)
    for shown in ("uptime_s", "12.5 s", "hbm", "2,184", "1.00 GiB", "cached.hbm", "122,000", "712 tok/s", "21.1 ms",
                  "deep.deeper.deepest.x", "[red]", "[/red]", "[1, 2]", "–"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_grew_is_shown_behind_the_number() -> None:
    text = drawn({"tokens": {"prompt": 120, "generated": 5}}, {"tokens": {"prompt": 100, "generated": 5}})
    assert "120 +20" in text
    assert "5 +" not in text


@pytest.mark.parametrize("facts", [{}, {"a": {}}, {"a": {"b": {}}}, {"a": []}, {"a": {"b": {"c": 1}, "d": {}}}])
def test_odd_shapes_are_drawn(facts: dict[str, Any]) -> None:
    drawn(facts)


def test_a_tier_with_many_counters_is_turned() -> None:
    text = drawn({"tiers": {"hbm": {f"counter_number_{n}": n for n in range(20)}}})
    assert len(text.splitlines()) > 20
    assert "counter_number_19" in text


TIERS: dict[str, Any] = {"tiers": {
    "hbm": {"slots": 182, "used_bytes": 2**26, "evicted_by_reason": {"space": 277, "dirty": 3},
            "age_at_hit": {"count": 1, "p50_s": 0.471}, "heap": 10},
    "ram": {"slots": 728, "used_bytes": 2**27, "evicted_by_reason": {}, "age_at_hit": {"count": 2, "p50_s": 0.001},
            "heap": 381},
    "nvme": {"slots": 5752, "used_bytes": 2**28, "evicted_by_reason": {"bad_record": 4},
             "age_at_hit": {"count": 0, "p50_s": 0.0}, "heap": 7}}}


def test_tiers_stand_side_by_side_with_what_is_nested_in_them() -> None:
    rows = {line.strip("│ ").split()[0]: line.strip("│ ").split()[1:] for line in drawn(TIERS).splitlines()[1:-1]}
    assert list(rows) == ["hbm", "slots", "used_bytes", "evicted_by_reason.bad_record", "evicted_by_reason.space",
                          "evicted_by_reason.dirty", "age_at_hit.count", "age_at_hit.p50_s", "heap"]
    assert rows["hbm"] == ["ram", "nvme"]
    assert rows["slots"] == ["182", "728", "5,752"]
    assert rows["used_bytes"] == ["64.0", "MiB", "128", "MiB", "256", "MiB"]
    assert rows["evicted_by_reason.dirty"] == ["3"]
    assert rows["age_at_hit.count"] == ["1", "2", "0"]


def test_what_grew_within_a_tier_is_shown_behind_its_number() -> None:
    before = copy.deepcopy(TIERS)
    before["tiers"]["hbm"]["evicted_by_reason"]["space"] -= 40
    before["tiers"]["ram"]["slots"] -= 8
    text = drawn(TIERS, before)
    assert "277 +40" in text
    assert "728 +8" in text


def test_a_number_in_one_row_and_an_object_in_another_are_both_shown() -> None:
    text = drawn({"a": {"one": {"x": 5}, "two": {"x": {"y": 7}}, "three": {"x": {}}}})
    assert "5" in text
    assert "x.y" in text
    assert "7" in text


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (1023, "1,023 B"), (1536, "1.50 KiB"), (10 * 2**20, "10.0 MiB"), (512 * 2**20, "512 MiB"),
    (2**30, "1.00 GiB"), (5000 * 2**40, "5,000 TiB"),
])
def test_bytes_are_humanised(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("key", "value", "text"), [
    ("bytes", 1024, "1.00 KiB"), ("read_bytes_s", 2**20, "1.00 MiB/s"), ("hit_ratio", 0.875, "87.5%"),
    ("slots", 1234567, "1,234,567"), ("load_s", 0.123456, "0.123 s"), ("ok", True, "True"), ("x", None, "–"),
    ("prefill_tok_s", 712.43, "712 tok/s"), ("name", "smollm2", "smollm2"), ("tokens", 5, "5"),
])
def test_a_key_tells_the_unit(key: str, value: Any, text: str) -> None:
    assert humanised(key, value) == text


def test_leaves_have_dotted_names() -> None:
    assert dict(flat({"a": {"b": {"c": 1}}, "d": 2, "e": {}})) == {"a.b.c": 1, "d": 2, "e": {}}


def test_stats_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(stats=STATS) as stub:
        assert main(["stats", "--url", stub.url]) == 0
        assert "never_seen" in capsys.readouterr().out
        assert main(["stats", "--url", stub.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == STATS


@pytest.mark.parametrize("stats", [None, [1, 2]])
def test_another_kind_of_server_is_named(stats: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(stats=stats) as stub:
        assert main(["stats", "--url", stub.url]) == 2
    assert "/v1/cache/stats" in capsys.readouterr().err


def test_nobody_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--url", f"127.0.0.1:{free_port()}"]) == 2
    assert "Connection refused" in capsys.readouterr().err


def read_until(terminal: int, wanted: str) -> str:
    seen = b""
    while wanted.encode() not in seen:
        seen += os.read(terminal, 4096)
    return seen.decode(errors="replace")


def test_watching_shows_growth_and_outlives_the_server() -> None:
    """On a terminal; Ctrl-C ends it with 0."""
    ours, its = pty.openpty()
    counters = {"tokens": {"prompt": 100}}
    with Stub(stats=counters) as stub:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.cli.main", "stats", "--url", stub.url, "--watch"], cwd=ROOT, stdin=its,
            stdout=its, stderr=its, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"})
        os.close(its)
        read_until(ours, "100")
        counters["tokens"]["prompt"] = 117
        read_until(ours, "+17")
    read_until(ours, "no answer from")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    os.close(ours)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), -float("inf"), -(10**400)])
@pytest.mark.parametrize("key", ["used_bytes", "mean_s", "hit_ratio", "count"])
def test_numbers_beyond_arithmetic_are_shown_as_they_came(key: str, value: float) -> None:
    facts = {"a": {key: value, "b": {key: value}}}
    Console(file=io.StringIO()).print(show_facts(facts, {"a": {key: 1, "b": {key: 1.5}}}))
    assert humanised(key, value) == str(value)
