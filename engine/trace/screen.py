"""A replay on the terminal: progress while it plays, the report when it has ended.

Knows rich and the report's fields. Measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from engine.trace.replay import Replayed
from engine.trace.report import Report

#: Without a terminal, a line this often.
_LINE_EVERY_S = 5.0
_BAR = 40
_WIDTH = 100

#: Reasons and tiers in words; what is not here is shown as the server named it.
MEANINGS = {
    "hbm": "a hit, where it was computed",
    "ram": "restored from RAM",
    "nvme": "restored from NVMe",
    "shared": "restored from the shared store",
    "never_seen": "new text",
    "evicted": "known once, dropped for want of room",
    "load_failed": "known, but its bytes could not be restored",
    "block_rounding": "agrees only in part of a block",
    "last_token": "each prompt's last is computed",
}

Step = Callable[[int, str], None]


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Step]:
    """A bar that `step(done, note)` moves; on what is no terminal, a line every few seconds."""
    if not console.is_terminal:
        yield _lines(console, title, total)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=28),
               MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[dim]{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _lines(console: Console, title: str, total: int) -> Step:
    last = time.monotonic()

    def step(done: int, note: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S or done == total:
            last = time.monotonic()
            console.print(f"{title}: {done}/{total}  {note}", markup=False, highlight=False)

    return step


def seen_note(seen: Replayed) -> str:
    """A replay so far, in a few words: how much of its prompts came from the cache."""
    usages = [r.reply.usage for r in seen.rows if r.reply.usage is not None]
    prompt = sum(u.prompt for u in usages)
    cached = sum(u.cached or 0 for u in usages)
    note = f"{cached / prompt:.0%} of {prompt:,} prompt tokens cached" if prompt else ""
    return f"{note}  {seen.errors} errors".strip() if seen.errors else note


def show_report(console: Console, report: Report) -> None:
    body: list[RenderableType] = [_tokens(report), Text(), _times(report)]
    title = (f"{report['requests']:,} requests · {report['output_tokens']:,} tokens out · "
             f"{report['wall_s']:.1f} s")
    if report["output_tok_s"] is not None:
        title += f" · {report['output_tok_s']:,.1f} tokens/s"
    width = min(console.width, _WIDTH)
    title = f"[bold]{title}"
    console.print(Panel(Group(*body), title=title, title_align="left", padding=(1, 2), width=width))
    _show_troubles(console, report)


def _tokens(report: Report) -> RenderableType:
    """Where the prompts' tokens came from: one row a source, a bar for its share."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(min_width=18)
    table.add_column(justify="right", min_width=9)
    table.add_column(justify="right", min_width=6)
    table.add_column(no_wrap=True)
    prompt = report["prompt_tokens"]
    table.add_row("[bold]prompt tokens", f"[bold]{prompt:,}")
    _source(table, "[green]from the cache", report["cached_tokens"], prompt, "green", _ideal(report))
    for tier, tokens in report["tiers"].items():
        _detail(table, tier, tokens, prompt)
    _source(table, "[yellow]computed", report["computed_tokens"], prompt, "yellow", "")
    for reason, tokens in sorted(report["computed"].items(), key=lambda item: -item[1]):
        _detail(table, reason, tokens, prompt)
    return table


def _source(table: Table, name: str, tokens: int, prompt: int, colour: str, note: str) -> None:
    share = tokens / prompt if prompt else 0.0
    filled = min(_BAR, max(0, round(share * _BAR)))
    bar = f"[{colour}]{'━' * filled}[/][dim]{'─' * (_BAR - filled)}[/]"
    table.add_row(name, f"{tokens:,}", f"{share:.1%}", bar)
    if note:
        table.add_row("", "", "", f"[dim]{note}")


def _detail(table: Table, name: str, tokens: int, prompt: int) -> None:
    share = f"{tokens / prompt:.1%}" if prompt else ""
    meaning = MEANINGS.get(name, "")
    table.add_row(f"  [dim]{escape(name)}", f"[dim]{tokens:,}", f"[dim]{share}", f"[dim]{meaning}")


def _ideal(report: Report) -> str:
    ideal, got = report["ideal_cached_ratio"], report["cached_ratio"]
    if ideal is None or got is None:
        return ""
    return f"infinite cache {ideal:.1%}" + (f": {got / ideal:.1%} of it" if ideal else "")


def _times(report: Report) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("milliseconds", min_width=24)
    for p in ("p50", "p90", "p99"):
        table.add_column(p, justify="right", min_width=9)
    rows = {"time to first token": "ttft_ms", "  a session's first turn": "ttft_first_turn_ms",
            "  its later turns": "ttft_later_turns_ms", "between tokens": "itl_ms", "whole answer": "e2e_ms"}
    for name, key in rows.items():
        cells = [_ms(report[key][p]) for p in ("p50", "p90", "p99")]
        style = "dim" if name.startswith(" ") else ""
        table.add_row(name, *cells, style=style)
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _show_troubles(console: Console, report: Report) -> None:
    server: Mapping[str, Any] = report["server"]
    if report["errors"]:
        console.print(f"[red]{report['errors']} of {report['requests']} requests failed:[/]")
        for message, count in server["error_messages"].items():
            console.print(f"  {count} × {message}", markup=False, highlight=False)
    if report["stopped_at_context"]:
        console.print(f"{report['stopped_at_context']} sessions stopped at the server's context limit (no "
                      "error)", highlight=False)
    for note in server["notes"]:
        console.print(f"note: {note}", style="dim", markup=False, highlight=False)
