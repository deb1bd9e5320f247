"""`trunkline demo`: a model, a server, recorded agents played against it, and what its cache did for them.

HBM and RAM are made so small that much of what is cached has to be moved up again, and the server is stopped and
started once, so that each tier and a warm restart are seen at work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.panel import Panel

from engine.cli import pull
from engine.cli.background import BackgroundServer
from engine.cli.replay import (
    DEFAULT_URL,
    FAILED,
    INTERRUPTED,
    at_least_one,
    check_writable,
    describe,
    exit_code,
    play,
    write_report,
)
from engine.errors import ModelError, StartError
from engine.model.library import resolve
from engine.trace.client import Client, ContextReached, TurnFailed
from engine.trace.formats import Session, Trace, load_trace
from engine.trace.replay import ReplaySettings, plain_prompt
from engine.trace.report import Report
from engine.trace.screen import show_report

MODEL = "smollm2"
TRACE = Path("bench", "traces", "demo.jsonl")

#: The demo is to end soon, whatever the trace: these bound what it plays.
MAX_TURNS = 60
MAX_TOKENS = 24
CONCURRENCY = 4

#: So small that the agents' transcripts (some 370 MiB of KV) fit neither in HBM nor in both; a single one fits in HBM.
HBM_MIB, RAM_MIB, NVME_MIB = 112, 64, 1024
#: Bytes of a block of MODEL in bf16, for which those sizes are meant; fp32 has twice as many, and gets twice the room.
BLOCK_BYTES = 368_640

_START_S = 180.0
_ANSWER_S = 120.0
_POLL_S = 0.1
_TIERS = {"ram": "RAM", "nvme": "NVMe"}
#: Words of the prompts that warm the server up and measure its cold prefill; about 5 tokens each.
_WARM_WORDS, _MEASURED_WORDS = 30, 200


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "demo", help="a model, a server, a replay and a report, in a minute or two",
        description=f"Pull {MODEL} if it is not here, start a server on a free port, replay recorded agents "
        "against it over HTTP, report what its cache did, and stop the server.")
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help=f"recorded sessions (default: {TRACE.as_posix()} of the checkout)")
    parser.add_argument("--concurrency", type=at_least_one, default=CONCURRENCY, metavar="C",
                        help="sessions at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT",
                        help="write the report here as JSON (default: not)")


def run(args: argparse.Namespace) -> int:
    """0 if every turn was answered, 1 if any failed, 130 after Ctrl-C; StartError if it can't begin."""
    console = Console()
    trace = bounded(load_trace(args.trace or find_trace()))
    if args.json is not None:
        check_writable(args.json)
    _end_as_by_ctrl_c()
    console.print("[bold]1/4  the model[/]")
    _fetch_model(console)
    with (tempfile.TemporaryDirectory(prefix="trunkline-demo-", ignore_cleanup_errors=True) as folder,
          BackgroundServer(arguments(Path(folder), BLOCK_BYTES)) as server):
        code = asyncio.run(_demo(console, server, Path(folder), trace, args))
        with console.status("stopping the server"):
            server.stop()
    if code == FAILED:
        console.print(f"The end of the server's log, {server.log}:\n{server.tail()}", markup=False,
                      highlight=False)
    else:
        server.forget_log()
    return code


def arguments(folder: Path, block_bytes: int) -> list[str]:
    """The server's, with tiers for so many blocks as the demo is meant to have."""
    hbm, ram, nvme = (f"{mib * block_bytes // BLOCK_BYTES}MiB" for mib in (HBM_MIB, RAM_MIB, NVME_MIB))
    return ["--model", MODEL, "--hbm", hbm, "--ram", ram, "--nvme", str(folder), "--nvme-size", nvme]


def find_trace() -> Path:
    """The demo's trace in the checkout that this package, or the working directory, is in."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / TRACE).is_file():
            return root / TRACE
    raise StartError(f"the demo's trace, {TRACE.as_posix()}, is not part of an installed package. Run "
                     "`make demo` in a checkout of the repository, or name a trace with --trace FILE")


def bounded(trace: Trace) -> Trace:
    """The first sessions that have no more than MAX_TURNS turns together; always at least one."""
    kept: list[Session] = []
    turns = 0
    for session in trace.sessions:
        turns += len(session.turns())
        if kept and turns > MAX_TURNS:
            break
        kept.append(session)
    return Trace(trace.name, trace.format, kept)


def _fetch_model(console: Console) -> None:
    try:
        files = resolve(MODEL, download=False)
    except ModelError:
        console.print(f"     {MODEL} is not here yet: downloading 93 MB", highlight=False)
        pull.run(argparse.Namespace(name=MODEL))
        files = resolve(MODEL, download=False)
    console.print(f"     {files.path}", markup=False, highlight=False, soft_wrap=True)


async def _demo(console: Console, server: BackgroundServer, folder: Path, trace: Trace,
                args: argparse.Namespace) -> int:
    async with Client(server.url, timeout_s=_ANSWER_S) as client:
        console.print("[bold]2/4  the server[/]")
        await _until_ready(console, server, client)
        block_bytes = await _block_bytes(client)
        if block_bytes > BLOCK_BYTES:
            console.print("     this CPU computes in float32: starting again with as much more room")
            server.restart(arguments(folder, block_bytes))
            await _until_ready(console, server, client)
        console.print(f"     small tiers, to see them at work: {' '.join(arguments(folder, block_bytes)[2:6])} and a "
                      f"folder for NVMe", highlight=False)
        console.print("     reading a prompt that nothing is known of, to have a speed to compare with")
        with console.status("measuring"):
            cold = await measure_cold(client)
        console.print("[bold]3/4  the agents[/]")
        turns = trace.turns(MAX_TURNS)
        console.print(f"     {len(trace.sessions)} recorded sessions, {turns} turns of {MAX_TOKENS} tokens, "
                      f"{args.concurrency} sessions at once", highlight=False)
        settings = ReplaySettings(concurrency=args.concurrency, max_tokens=MAX_TOKENS, max_turns=MAX_TURNS)
        seen, ideal = await play(console, client, trace, settings)
        report = describe(seen, ideal, trace, settings, client)
    show_report(console, report)
    _show_saved(console, report, cold)
    if args.json is not None:
        write_report(args.json, report)
    if seen.interrupted:
        return INTERRUPTED
    code = exit_code(report)
    if code != FAILED:
        await _warm_restart(console, server, trace)
    _show_next(console)
    return code


async def _block_bytes(client: Client) -> int:
    """Bytes of a block, as the server counts them; the usual number where it does not say."""
    try:
        hbm = (await client.get_json("/v1/cache/stats"))["tiers"]["hbm"]
        return int(hbm["bytes"] // hbm["slots"])
    except (StartError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return BLOCK_BYTES


async def _warm_restart(console: Console, server: BackgroundServer, trace: Trace) -> None:
    """Stop the server, start it again on its folder, and ask a session's last turn once more."""
    console.print("[bold]4/4  a restart[/]")
    with console.status("stopping the server, which writes what it has not persisted yet"):
        await asyncio.to_thread(server.restart)
    async with Client(server.url, timeout_s=_ANSWER_S) as client:
        await _until_ready(console, server, client)
        session = trace.sessions[0]
        prompt = plain_prompt(session, session.turns()[-1])
        reply = await client.chat({**prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True,
                                   "stream_options": {"include_usage": True}})
    usage = reply.usage
    if usage is not None and usage.cached is not None:
        console.print(f"     the last turn of session {session.id} again: {usage.cached:,} of {usage.prompt:,} prompt "
                      f"tokens {_by_tier(usage.tiers)}, first token after {reply.ttft_s:.2f} s", highlight=False)


def _by_tier(tiers: Mapping[str, int]) -> str:
    found = [f"{tokens:,} {'in HBM' if name == 'hbm' else f'from {_TIERS.get(name, name)}'}"
             for name, tokens in tiers.items() if tokens]
    return f"cached ({', '.join(found)})" if found else "cached"


async def _until_ready(console: Console, server: BackgroundServer, client: Client) -> None:
    """Wait for /health; StartError with the log's end if the server ends or does not get ready."""
    began = time.monotonic()
    console.print(f"     starting, and loading {MODEL} (its log: {server.log})", markup=False, highlight=False)
    with console.status("waiting for it to be ready"):
        while not await client.healthy():
            server.check_alive()
            if time.monotonic() - began > _START_S:
                raise StartError(f"the server was not ready after {_START_S:.0f} s. "
                                 f"The end of {server.log}:\n{server.tail()}")
            await asyncio.sleep(_POLL_S)
    client.model = await client.first_model()
    console.print(f"     {client.url}, ready after {time.monotonic() - began:.1f} s", highlight=False)


@dataclass(frozen=True, slots=True)
class Cold:
    """One prompt that nothing was known of: tokens computed, and seconds to its first token."""

    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


async def measure_cold(client: Client) -> Cold | None:
    """How fast this server reads what it has never seen; None if it would not say. Nothing else may run."""
    try:
        await client.chat(_unrelated(_WARM_WORDS, seed=1))
        reply = await client.chat(_unrelated(_MEASURED_WORDS, seed=2))
    except (TurnFailed, ContextReached):
        return None
    if reply.usage is None or reply.ttft_s <= 0:
        return None
    return Cold(reply.usage.prompt - (reply.usage.cached or 0), reply.ttft_s)


def _unrelated(words: int, seed: int) -> dict[str, Any]:
    """A chat that shares no text with any trace, nor with one of another seed."""
    text = " ".join(str((seed * 7919 + n * n * 31) % 9973) for n in range(words))
    return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "Go on."}],
            "max_tokens": 1, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


def saved(report: Report, cold: Cold | None) -> str:
    """What the cache was worth, in words that say how it is known."""
    cached, prompt = report["cached_tokens"], report["prompt_tokens"]
    text = f"{cached:,} of {prompt:,} prompt tokens were not computed again.{restored(report['tiers'], cached)}"
    if cold is None or not cached:
        return text
    more = f"[bold]{cached / cold.tok_s:,.0f} s[/]"
    return (f"{text} Computing them would have taken about {more} more; the whole replay took "
            f"{report['wall_s']:.0f} s.\n[dim]An estimate: cached tokens ÷ {cold.tok_s:,.0f} tokens/s, the "
            f"speed of one cold prompt of {cold.tokens:,} tokens, measured alone just before the replay. Longer "
            "prompts are slower by the token, so it is rather too low than too high.")


def restored(tiers: Mapping[str, int], cached: int) -> str:
    """How many of them had left HBM and were moved up again, from where; nothing if none was."""
    up = {name: tokens for name, tokens in tiers.items() if name != "hbm" and tokens}
    if not up:
        return ""
    return (f"\n[bold]{sum(up.values()) / cached:.0%}[/] of them had left HBM, which is {HBM_MIB} MiB here, and were "
            f"restored: {', '.join(f'{tokens:,} from {_TIERS.get(name, name)}' for name, tokens in up.items())}.")


def _show_saved(console: Console, report: Report, cold: Cold | None) -> None:
    console.print(Panel(saved(report, cold), title="[bold]what the cache saved", title_align="left",
                        padding=(1, 2), width=min(console.width, 100)))


def _show_next(console: Console) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})
    trunkline = _command()
    ideas = {
        "a server of your own": f"{trunkline} serve --model {MODEL}",
        "talk to it": f"curl {DEFAULT_URL}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "replay your own agents (OpenAI messages, a session a line)":
            f"{trunkline} replay TRACE.jsonl --concurrency 4",
        "watch its cache": f"{trunkline} stats --watch",
    }
    console.print("\n[bold]What to try next[/]  [dim](README.md and docs/ say more)[/]")
    for idea, command in ideas.items():
        console.print(f"  {idea}", style="dim", highlight=False)
        console.print(f"    {command}", markup=False, highlight=False, soft_wrap=True)


def _command() -> str:
    """How this user can call `trunkline`."""
    if shutil.which("trunkline"):
        return "trunkline"
    beside = Path(sys.executable).parent / "trunkline"
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m engine.cli.main"
    near = beside.is_relative_to(Path.cwd())
    return shlex.quote(str(beside.relative_to(Path.cwd()) if near else beside))


def _end_as_by_ctrl_c() -> None:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does, so that the server is stopped. nohup still holds."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """What Ctrl-C does at this moment: asyncio has a handler of its own, which cancels what runs in order."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):       # it is ignored, as in a shell's background
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
