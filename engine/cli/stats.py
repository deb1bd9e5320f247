"""`trunkline stats`: what a server's cache holds and has done, once or every second."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from engine.errors import StartError
from engine.trace.client import Client
from engine.trace.facts import Facts, show_facts

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
_EVERY_S = 1.0


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "stats", help="what a server's cache holds and has done",
        description="Print a Trunkline server's /v1/cache/stats.")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (default: none)")
    parser.add_argument("--watch", action="store_true", help="refresh every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the server's JSON as it is")


def run(args: argparse.Namespace) -> int:
    """0, or a StartError where there is no such server."""
    console = Console()
    client = Client(args.url, api_key=args.api_key, timeout_s=_TIMEOUT_S)
    try:
        asyncio.run(_stats(console, client, watch=args.watch, raw=args.json))
    except KeyboardInterrupt:
        console.print()
    return 0


async def _stats(console: Console, client: Client, *, watch: bool, raw: bool) -> None:
    async with client:
        facts = await _fetch(client)
        if watch and console.is_terminal and not raw:
            await _watch(console, client, facts)
            return
        while True:
            _print(console, facts, raw)
            if not watch:
                return
            await asyncio.sleep(_EVERY_S)
            facts = await _fetch(client)


async def _watch(console: Console, client: Client, facts: Facts) -> None:
    with Live(show_facts(facts), console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                before, facts = facts, await _fetch(client)
                live.update(show_facts(facts, before), refresh=True)
            except StartError as error:  # a restart, perhaps: keep the last numbers, say so, and ask again
                live.update(Group(show_facts(facts), Text(error.message, style="red")), refresh=True)


async def _fetch(client: Client) -> Facts:
    found = await client.get_json("/v1/cache/stats")
    if not isinstance(found, dict):
        raise StartError(f"{client.url}/v1/cache/stats is no object; is it a Trunkline server?")
    return found


def _print(console: Console, facts: Facts, raw: bool) -> None:
    if raw:
        print(json.dumps(facts), flush=True)
    else:
        console.print(show_facts(facts))
