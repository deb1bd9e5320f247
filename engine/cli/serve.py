"""`trunkline serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from typing import Any

from engine.config import add_arguments, resolve


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "serve", help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. A value is taken from the command line, "
        "else from the environment, else from the --config file.")
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 after SIGTERM or Ctrl-C; raises StartError if the server can't start."""
    from engine.api.server import serve  # not for --help: it takes most of a second

    config = resolve(vars(args))
    logging.basicConfig(stream=sys.stderr, level=config.log_level.upper(),
                        format="%(asctime)s %(levelname)s %(message)s")
    return asyncio.run(serve(config))
