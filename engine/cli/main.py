"""`trunkline COMMAND`: finds the command's module and runs it.

Only the module of the command that was asked for is imported: `trunkline stats` needs no server. A StartError
is for a person: its message goes to stderr and the exit code is 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn, cast

from engine.config import nearest
from engine.errors import StartError

#: The command's module is `engine.cli.NAME`, with `add_parser(subparsers)` and `run(args) -> int`.
COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "pull": "download a model",
    "models": "list the models that are on this machine",
    "replay": "play recorded agents against a server, and report what its cache did",
    "stats": "what a server's cache holds and has done",
    "demo": "everything at once: a model, a server, a replay, a report",
    "version": "print the version",
}
INTERRUPTED = 130       # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(words).parse_args(words)
        if args.command is None:
            _parser([]).print_help()
            return 0
        return cast(int, importlib.import_module(f"engine.cli.{args.command}").run(args))
    except StartError as e:
        print(f"trunkline: {e.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `trunkline models | head`: nobody reads on, and Python would complain once more at exit.
        sys.stderr.close()
        return 1


class _Parser(argparse.ArgumentParser):
    """Accepts an option by its whole name only, and names the one that is nearest to an unknown one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            sub = self.chosen(found.command)
            name = unknown[0].partition("=")[0]
            sub.error(f"unknown argument {unknown[0]!r}{nearest(name, list(sub._option_string_actions))}")
        return found

    def chosen(self, command: str | None) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                return cast(argparse.ArgumentParser, action.choices[command])
        return self

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


def _parser(words: list[str]) -> _Parser:
    parser = _Parser(prog="trunkline", description="A serving engine for agents.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    wanted = next((w for w in words if not w.startswith("-")), None)
    for name, text in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"engine.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
