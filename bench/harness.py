"""What every bench shares: arguments, the machine, medians with their spread, the table and the JSON.

A row is {"name", "value", "unit", "spread", "reach", "holds"}: `reach` is what was asked for (None: nothing),
`holds` is computed from it. A row that falls short stays in.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Row:
    """One figure. `spread` is (max - min) / median over the repeats."""

    name: str
    value: float
    unit: str
    spread: float | None = None
    reach: str | None = None
    holds: bool | None = None


def at_least(name: str, value: float, unit: str, reach: float, spread: float | None = None) -> Row:
    return Row(name, value, unit, spread, f">= {reach:g}", value >= reach)


def at_most(name: str, value: float, unit: str, reach: float, spread: float | None = None) -> Row:
    return Row(name, value, unit, spread, f"<= {reach:g}", value <= reach)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller sizes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows there as well")
    return parser


def timed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median seconds, spread) of `repeats` runs after one that warms up."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return middle(seconds)


def middle(values: list[float]) -> tuple[float, float]:
    """(median, spread)."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median if median else 0.0


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 2), "date": datetime.date.today().isoformat(),
            **{name: _version(name) for name in ("torch", "numpy", "tokenizers", "trunkline")}}


def report(title: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Print the table; write the JSON if asked."""
    table = Table(title=title)
    for heading, justify in (("", "left"), ("value", "right"), ("unit", "left"), ("spread", "right"),
                             ("reach", "right"), ("holds", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for r in rows:
        table.add_row(r.name, f"{r.value:,.3g}" if r.value < 100 else f"{r.value:,.0f}", r.unit,
                      "" if r.spread is None else f"{r.spread:.0%}", r.reach or "",
                      "" if r.holds is None else "yes" if r.holds else "[bold red]no[/]")
    Console(width=max(100, Console().width)).print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows]}, indent=1)
                                + "\n")


def _cpu() -> str:
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]
        return f"{names[0]} x {len(names)}"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
