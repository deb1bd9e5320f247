"""The scripted agent's tools, and they are real: they list, read, search, change and test a project on disk.

What they print is the same on every machine and in every run: sorted, paths inside the project, no times.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MAX_LINES = 120


class ToolError(Exception):
    """What the agent is told instead of a result."""


class Tools:
    """The five tools, on the project in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        tools = {"list": self.list, "read": self.read, "search": self.search, "edit": self.edit,
                 "test": self.test}
        try:
            return tools[name](**arguments)
        except ToolError as error:
            return f"error: {error}"

    def list(self, path: str = ".") -> str:
        return "\n".join(f"{self._name(f)}  {len(_lines(f))} lines" for f in self._files(path))

    def read(self, path: str, first: int = 1, last: int | None = None) -> str:
        lines = _lines(self._inside(path))
        last = min(last or len(lines), first + MAX_LINES - 1, len(lines))
        head = f"{path}, lines {first} to {last} of {len(lines)}"
        return "\n".join([head, *(f"{n:>3} {lines[n - 1]}".rstrip() for n in range(first, last + 1))])

    def search(self, pattern: str, path: str = ".") -> str:
        found = [f"{self._name(f)}:{n}: {line.strip()}" for f in self._files(path)
                 for n, line in enumerate(_lines(f), start=1) if re.search(pattern, line)]
        return "\n".join(found) or f"no line matches {pattern!r}"

    def edit(self, path: str, old: str, new: str) -> str:
        file = self._inside(path)
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ToolError(f"the old text is in {path} {text.count(old)} times; it must be there once")
        changed = text.replace(old, new)
        file.write_text(changed, encoding="utf-8")
        diff = difflib.unified_diff(text.splitlines(), changed.splitlines(), path, path, n=1, lineterm="")
        return "\n".join(diff)

    def test(self, file: str | None = None) -> str:
        command = [sys.executable, "-B", "runtests.py", *([file] if file else [])]
        env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": "", "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=60,
                              check=False)
        printed = f"{done.stdout.rstrip()}\nexit code {done.returncode}"
        return f"{printed}\n{done.stderr}" if done.stderr else printed

    def _files(self, path: str) -> list[Path]:
        place = self._inside(path)
        if place.is_file():
            return [place]
        found = (p for p in place.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return sorted(found, key=self._name)

    def _inside(self, path: str) -> Path:
        place = (self.root / path).resolve()
        if not place.is_relative_to(self.root):
            raise ToolError(f"{path} is outside the project")
        if not place.exists():
            raise ToolError(f"there is no {path}")
        return place

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
