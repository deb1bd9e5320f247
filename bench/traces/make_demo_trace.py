"""Write the demo's trace: a scripted coding agent, with real tools, on real copies of `demo_project/`.

    python bench/traces/make_demo_trace.py [--out bench/traces/demo.jsonl]

The agent's words and calls are scripted (demo_sessions.py). What its tools print is what they really printed
(demo_tools.py), each session in a fresh temporary copy. Running it twice gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from demo_sessions import SESSIONS, SYSTEM, Step, User
from demo_tools import Tools

HERE = Path(__file__).resolve().parent
PROJECT = HERE / "demo_project"

Message = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's trace.")
    parser.add_argument("--out", type=Path, default=HERE / "demo.jsonl", help="default: %(default)s")
    out: Path = parser.parse_args().out
    sessions = ({"id": name, "messages": play(steps)} for name, steps in SESSIONS.items())
    lines = [json.dumps(session, ensure_ascii=False) + "\n" for session in sessions]
    out.write_text("".join(lines), encoding="utf-8", newline="\n")


def play(steps: list[Step]) -> list[Message]:
    """One session's messages, its tools run in a fresh copy of the project."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns("__pycache__"))
        tools = Tools(copy)
        messages: list[Message] = [{"role": "system", "content": SYSTEM}]
        for step in steps:
            messages += take(step, messages, tools)
        return messages


def take(step: Step, before: list[Message], tools: Tools) -> list[Message]:
    if isinstance(step, User):
        return [{"role": "user", "content": step.text}]
    if step.tool is None:
        return [{"role": "assistant", "content": step.text}]
    call = {"id": call_id(before), "type": "function",
            "function": {"name": step.tool, "arguments": json.dumps(step.arguments)}}
    return [{"role": "assistant", "content": step.text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": step.tool,
             "content": tools.call(step.tool, step.arguments)}]


def call_id(before: list[Message]) -> str:
    """From the transcript so far, so that sessions with the same past have the same ids."""
    return "call_" + hashlib.sha256(json.dumps(before).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
