"""`trunkline replay`: play recorded agents against any OpenAI-compatible server, and measure."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.errors import StartError
from engine.trace.client import Client
from engine.trace.formats import Trace, load_trace
from engine.trace.ideal import Ideal, ideal_ratio
from engine.trace.replay import Replay, Replayed, ReplaySettings
from engine.trace.report import Report, build_report
from engine.trace.screen import progress, seen_note, show_report

DEFAULT_URL = "http://127.0.0.1:8000"
FAILED = 1
INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "replay", help="play recorded agents against a server, and measure",
        description="Play recorded sessions against any OpenAI-compatible server. Each turn sends the "
        "transcript up to the next recorded assistant message, then the recorded message is appended. "
        "Formats: OpenAI messages JSONL (a session a line), tau-bench JSON.")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the recorded sessions")
    parser.add_argument("--url", default=DEFAULT_URL,
                        help="the server, with or without /v1 (default: %(default)s)")
    parser.add_argument("--model", help="model to name in requests (default: the first of /v1/models)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (default: none)")
    _add_schedule(parser)
    _add_request(parser)
    parser.add_argument("--json", type=Path, metavar="OUT",
                        help="write the report here as JSON (default: not)")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is played, and when")
    group.add_argument("--sessions", type=at_least_one, metavar="N",
                       help="the first N sessions (default: all)")
    group.add_argument("--max-turns", type=at_least_one, metavar="T",
                       help="the first T turns of each (default: all)")
    group.add_argument("--concurrency", type=at_least_one, default=1, metavar="C",
                       help="C workers play whole sessions, one after another (default: %(default)s)")
    group.add_argument("--interleave", action="store_true",
                       help="all sessions are open, and each next turn queues behind everybody else's")
    group.add_argument("--speedup", type=above_zero, metavar="S",
                       help="wait as recorded, S times faster; 1 is as recorded (default: no waits)")


def _add_request(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("each request")
    group.add_argument("--max-tokens", type=at_least_one, default=32, metavar="K",
                       help="tokens to generate in a turn (default: %(default)s)")
    group.add_argument("--temperature", type=not_negative, default=0.0, metavar="X",
                       help="0 is greedy (default: %(default)s)")
    group.add_argument("--ignore-eos", action="store_true",
                       help="generate all of --max-tokens; not every server can")
    group.add_argument("--fold-tools", action="store_true",
                       help="send tool calls and results as text, for models whose template knows no tools "
                       "(default: left to the server)")
    group.add_argument("--timeout", type=above_zero, default=600.0, metavar="S",
                       help="seconds for one whole answer (default: %(default)g)")


def run(args: argparse.Namespace) -> int:
    """0 if every turn was answered, 1 if any failed, 130 after Ctrl-C; StartError before the first turn."""
    console = Console()
    trace = load_trace(args.trace, args.sessions)
    if args.json is not None:
        check_writable(args.json)
    settings = ReplaySettings(
        concurrency=args.concurrency, max_tokens=args.max_tokens, max_turns=args.max_turns,
        speedup=args.speedup, temperature=args.temperature, ignore_eos=args.ignore_eos,
        fold_tools=args.fold_tools, interleave=args.interleave)
    client = Client(args.url, api_key=args.api_key, timeout_s=args.timeout)
    report, interrupted = asyncio.run(_replay(console, client, args.model, trace, settings))
    show_report(console, report)
    if args.json is not None:
        write_report(args.json, report)
        console.print(f"written to {args.json}", style="dim", markup=False, highlight=False)
    return INTERRUPTED if interrupted else exit_code(report)


def exit_code(report: Report) -> int:
    return FAILED if report["errors"] else 0


def write_report(path: Path, report: Report) -> None:
    """Raises StartError where it can't be written."""
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartError(f"--json {path}: can't be written ({error.strerror})") from None


async def _replay(console: Console, client: Client, model: str | None, trace: Trace,
                  settings: ReplaySettings) -> tuple[Report, bool]:
    async with client:
        client.model = model or await client.first_model()
        console.print(f"{trace.name} ({trace.format}): {len(trace.sessions)} sessions, "
                      f"{trace.turns(settings.max_turns)} turns → {client.model} at {client.url}",
                      markup=False, highlight=False)
        seen, ideal = await play(console, client, trace, settings)
    return describe(seen, ideal, trace, settings, client), seen.interrupted


async def play(console: Console, client: Client, trace: Trace,
               settings: ReplaySettings) -> tuple[Replayed, Ideal]:
    """Replay with a progress bar, then ask the server's tokenizer for what the ideal needs."""
    total = trace.turns(settings.max_turns)
    with progress(console, "replaying", total) as step:
        replay = Replay(client, trace.sessions, settings, clock=time.perf_counter,
                        on_turn=lambda seen: step(len(seen.rows) + seen.errors, seen_note(seen)))
        seen = await replay.run()
    if seen.interrupted:
        return seen, Ideal(None, "the replay was interrupted")
    with progress(console, "counting what an infinite cache would hit", len(seen.rows)) as step:
        try:
            return seen, await ideal_ratio(seen.rows, client.tokenize, lambda done: step(done, ""))
        except asyncio.CancelledError:  # Ctrl-C: the replay itself is whole
            return seen, Ideal(None, "interrupted")


def describe(seen: Replayed, ideal: Ideal, trace: Trace, settings: ReplaySettings, client: Client) -> Report:
    played: dict[str, Any] = {"trace": trace.name, "format": trace.format, "sessions": len(trace.sessions),
                              **asdict(settings)}
    return build_report(seen, ideal, settings=played, server={"url": client.url, "model": client.model})


def check_writable(path: Path) -> None:
    """The usual mistakes, told before an hour of replay and not after it."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise StartError(f"--json {path}: can't be written there; name a file in a folder that exists")


def at_least_one(text: str) -> int:
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def not_negative(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def above_zero(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
