"""`trunkline version`."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.api.state import package_version

#: What one asks for in a bug report. Read from metadata: importing torch takes seconds.
TOLD = ("torch", "tokenizers", "numpy", "aiohttp", "pydantic")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    subparsers.add_parser("version", help="print the version", description="Print the version.")


def run(args: argparse.Namespace) -> int:
    print(f"trunkline {package_version()}")
    others = ", ".join(f"{name} {_version(name)}" for name in TOLD)
    print(f"Python {platform.python_version()}, {others}; {platform.system()} {platform.machine()}")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
