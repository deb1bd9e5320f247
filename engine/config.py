"""The options of `trunkline serve`: one table, from which everything about them is made.

The table is `ServeConfig` itself: each field carries its parser, help and unit. argparse, the environment
(`TRUNKLINE_*`), the TOML file and the start-up banner read it from there, so an option can't be in one of
them and not in another. Precedence: command line, environment, file, default.

This module knows what a value must look like; it does not know whether the machine has that much memory or
whether the model exists: those are found out by who uses them.
"""

# ruff: noqa: RUF009  (`_option` makes a dataclass field; it is not a default that instances share)
from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from engine.errors import ConfigError

T = TypeVar("T")

ENV_PREFIX = "TRUNKLINE_"
#: Variables of ours that are not options of `serve`.
OTHER_ENV = frozenset({"TRUNKLINE_CACHE"})

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: How much of a value an error repeats.
SHOWN_CHARS = 200
SIZES = "a size such as 1GiB, 768MiB or 512MB (KB, MB, GB, TB count in 1000s; KiB, MiB, GiB, TiB in 1024s)"


class _Bad(ValueError):
    """A parser's refusal; the message says what is allowed."""


def parse_size(text: str) -> int:
    """Bytes in `text`; raises ValueError that says what is allowed."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise _Bad(SIZES)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if "." in found[1] else (
        int(found[1]) * _UNITS[found[2].upper()])
    if not 0 < size < 2**63:
        raise _Bad(f"{SIZES}, more than 0 and less than 8 EiB")
    return size


def _size_or_none(text: str) -> int:
    """A size, or 0: none of it."""
    if re.fullmatch(r"\s*0+\s*[A-Za-z]*\s*", text):
        return 0
    try:
        return parse_size(text)
    except _Bad as e:
        raise _Bad(f"{e}; or 0 for none") from None


def _rate(text: str) -> int:
    """Bytes a second."""
    try:
        return parse_size(re.sub(r"\s*/\s*s\s*$", "", text))
    except _Bad:
        raise _Bad("bytes a second such as 64MB/s or 1GiB/s") from None


_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
#: A year: longer waits are typos, and sums of times stay exact.
MOST_SECONDS = 366 * 86400.0


def _duration(text: str) -> float:
    """Seconds in `text`: 600, 10m, 2s, 500ms, 1.5h."""
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in _SECONDS or (
            not (seconds := float(found[1]) * _SECONDS[found[2].lower()]) <= MOST_SECONDS):
        raise _Bad("a time such as 600, 500ms, 2s, 10m or 1h (a number alone is seconds; a year at most)")
    return seconds


def format_duration(seconds: float) -> str:
    """`seconds` for a person, exactly: the largest unit that gives a whole number."""
    for unit, name in ((3600, "h"), (60, "m")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:g}{name}"
    return f"{seconds:g}s" if seconds >= 1 or not seconds else f"{1000 * seconds:g}ms"


def format_size(size: int) -> str:
    """`size` bytes for a person, exactly: the largest unit that divides it."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def _text(text: str) -> str:
    if not text.strip():
        raise _Bad("a text that is not empty")
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):     # the last are bytes that are no UTF-8
        raise _Bad("a text in UTF-8 without control characters")
    return text


def _path(text: str) -> Path:
    try:
        return Path(_text(text)).expanduser()
    except RuntimeError:
        raise _Bad("a path: there is no such home folder") from None


def _key(text: str) -> str:
    if _text(text) != text.strip():
        raise _Bad("a key without spaces around it: no header can carry those")
    return text


def _whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    allowed = f"a whole number from {least} to {most:.0f}" if most < math.inf else (
        f"a whole number, {least} or more")

    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text) or not least <= int(text) <= most:
            raise _Bad(allowed)
        return int(text)
    return parse


def _power_of_two(most: int) -> Callable[[str], int]:
    allowed = ", ".join(str(2**i) for i in range(most.bit_length()))

    def parse(text: str) -> int:
        if text.strip() not in allowed.split(", "):
            raise _Bad(f"one of {allowed}")
        return int(text)
    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise _Bad(f"one of {', '.join(choices)}")
        return text
    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """What there is to know of one option. `show` writes its value for people (a secret is not shown)."""

    parse: Callable[[str], object]
    help: str
    metavar: str
    default_text: str
    repeatable: bool
    show: Callable[[Any], str]
    name: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _option(default: T, parse: Callable[[str], object], help: str, *, metavar: str,
            default_text: str | None = None, show: Callable[[Any], str] = str, secret: bool = False) -> T:
    repeatable = isinstance(default, tuple)
    text = default_text if default_text is not None else show(default)
    meta = Option(parse, help, metavar, text, repeatable, show)
    made: T = field(default=default, metadata={"option": meta}, repr=not secret)
    return made


def _count_keys(keys: Sequence[str]) -> str:
    return f"{len(keys)} set (not shown)" if keys else "none: no key is asked for"


def _join(values: Sequence[str]) -> str:
    return ", ".join(values) or "none"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Every option of `trunkline serve`, with its default. `sources` says where each value came from."""

    model: str = _option(
        "smollm2", _text, "the model: a name that `trunkline models` lists, org/name, or a path to a GGUF "
        "file or a Hugging Face folder", metavar="NAME|PATH")
    served_model_name: str | None = _option(
        None, _text, "the name that clients use", metavar="NAME", default_text="the model's own name")
    alias: tuple[str, ...] = _option(
        (), _text, "another name that clients may use, such as gpt-4o (repeatable)", metavar="NAME",
        show=_join)
    host: str = _option(
        "127.0.0.1", _text, "the address to listen on; 0.0.0.0 for every interface", metavar="ADDRESS")
    port: int = _option(
        8000, _whole(0, 65535), "the TCP port to listen on; 0 for any free one", metavar="PORT")
    hbm: int = _option(
        2**30, parse_size, "the size of the KV pool on the device (plain RAM where there is no GPU), "
        "allocated at start", metavar="SIZE", show=format_size)
    ram: int = _option(
        0, _size_or_none, "the size of the RAM tier below --hbm, allocated at start; without a GPU both are the same "
        "memory, so a larger --hbm serves better, and this is there to be tried", metavar="SIZE",
        default_text="0: none", show=lambda size: format_size(size) if size else "0: none")
    nvme: Path | None = _option(
        None, _path, "a folder on a local disk for the NVMe tier: what no longer fits goes there, and a restart finds "
        "it again; one server owns it", metavar="DIR", default_text="none")
    nvme_size: int | None = _option(
        None, parse_size, "the most that --nvme may hold, all models together", metavar="SIZE",
        default_text="none; needed with --nvme", show=format_size)
    persist_within: float = _option(
        2.0, _duration, "how soon a block that a restart should find is written to --nvme, at the latest",
        metavar="TIME", show=format_duration)
    nvme_write_limit: int | None = _option(
        None, _rate, "the most that is written to --nvme in a second, on average (flash wears)", metavar="RATE",
        default_text="as much as there is", show=lambda rate: f"{format_size(rate)}/s")
    session_idle: float = _option(
        600.0, _duration, "how long after its last request a conversation counts as open: what is open is persisted",
        metavar="TIME", show=format_duration)
    secret_file: Path | None = _option(
        None, _path, "the server's secret, which keeps tenants' cache salts apart: 32 bytes or more that nobody else "
        "can read, made when missing; the same on all replicas that share blocks", metavar="FILE",
        default_text="`secret` in the cache folder")
    dtype: Literal["auto", "bfloat16", "float32"] = _option(
        "auto", _one_of("auto", "bfloat16", "float32"),
        "the type of weights and KV: bfloat16, float32, or auto (bfloat16 where this CPU is fast in it, else "
        "float32)", metavar="TYPE")
    max_context: int | None = _option(
        None, _whole(16), "the longest sequence, prompt and reply together, in tokens", metavar="TOKENS",
        default_text="the model's own")
    block_size: int = _option(
        16, _power_of_two(512), "tokens in a block, the unit of reuse", metavar="TOKENS")
    step_tokens: int = _option(
        512, _whole(16, 65536), "the most tokens that one step computes: decodes first, then chunks of "
        "prefill", metavar="TOKENS")
    max_running: int = _option(
        16, _whole(1, 4096), "the most sequences in one step", metavar="SEQUENCES")
    max_waiting: int = _option(
        1024, _whole(1), "the most requests that wait for admission; one more is answered 429",
        metavar="REQUESTS")
    threads: int | None = _option(
        None, _whole(1, 1024), "threads that compute on the CPU", metavar="THREADS",
        default_text="one for each core")
    device: Literal["cpu"] = _option("cpu", _one_of("cpu"), "where the model runs: cpu", metavar="DEVICE")
    chat_template: Path | None = _option(
        None, _path, "a file with a Jinja chat template to use for the model's own", metavar="FILE",
        default_text="the model's own")
    api_key: tuple[str, ...] = _option(
        (), _key, "a key that clients must send, as `Authorization: Bearer KEY` (repeatable; other users "
        "of the machine can read a command line, so prefer the environment variable)", metavar="KEY",
        show=_count_keys, secret=True)
    max_body: int = _option(
        32 * 2**20, parse_size, "the largest request body; a larger one is answered 413", metavar="SIZE",
        show=format_size)
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", _one_of("debug", "info", "warning", "error"),
        "what is written to stderr: debug, info (a line for each request), warning or error",
        metavar="LEVEL")
    config: Path | None = _option(
        None, _path, "a TOML file with these options by name, such as hbm = \"2GiB\"", metavar="FILE",
        default_text="none")

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)


def _named(name: str, option: Option) -> Option:
    return Option(option.parse, option.help, option.metavar, option.default_text, option.repeatable,
                  option.show, name)


OPTIONS: dict[str, Option] = {
    f.name: _named(f.name, f.metadata["option"]) for f in fields(ServeConfig) if "option" in f.metadata}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option to `parser`, unparsed (`resolve` parses, so that all sources fail alike)."""
    for option in OPTIONS.values():
        text = f"{option.help} [default: {option.default_text}; env {option.env}]".replace("%", "%%")
        parser.add_argument(option.flag, dest=option.name, metavar=option.metavar, default=None, help=text,
                            action="append" if option.repeatable else "store")


def nearest(name: str, names: Sequence[str]) -> str:
    """` (did you mean X?)`, or nothing where no name is near."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def resolve(given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration from what argparse gave (None: not given), the environment and the file.

    Raises ConfigError naming the option, the value and what is allowed.
    """
    env = os.environ if env is None else env
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for source, raw in _layers(given, env):
        for name, value in raw.items():
            values[name] = _parse(OPTIONS[name], value, source)
            sources[name] = source
    config = ServeConfig(**values, sources=sources, notes=_notes(env))  # type: ignore[arg-type]
    _check_together(config)
    return config


def _check_together(config: ServeConfig) -> None:
    """Options that need each other."""
    if config.nvme is not None and config.nvme_size is None:
        raise ConfigError(f"--nvme {config.nvme} needs --nvme-size, the most that it may hold, such as "
                          f"--nvme-size 20GiB", param="nvme_size")
    for name in ("nvme_size", "nvme_write_limit"):
        if config.nvme is None and getattr(config, name) is not None:
            option = OPTIONS[name]
            raise ConfigError(f"{option.flag} {option.show(getattr(config, name))} (from the {config.sources[name]}) "
                              f"does nothing without --nvme DIR, the folder that it is about", param=name)


def _layers(given: Mapping[str, Any], env: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Sources from the weakest to the strongest."""
    cli = {n: given[n] for n in OPTIONS if given.get(n) is not None}
    by_env: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if env.get(option.env):
            text = env[option.env]
            by_env[name] = [t.strip() for t in text.split(",") if t.strip()] if option.repeatable else text
    layers = [(f"environment, {OPTIONS[n].env}", {n: value}) for n, value in by_env.items()]
    file = cli.get("config") or by_env.get("config")
    if file:
        source = "command line" if cli.get("config") else f"environment, {OPTIONS['config'].env}"
        path = _parse(OPTIONS["config"], file, source)
        layers.insert(0, (f"file {file}", _read_toml(cast(Path, path))))
    return [*layers, ("command line", cli)]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: can't be read: {e.strerror or e}", param="config") from e
    except (ValueError, RecursionError) as e:   # TOML's own error, bytes, numbers of a million digits, deep nesting
        raise ConfigError(f"--config {path}: not a TOML file: {e}", param="config") from e
    out: dict[str, Any] = {}
    allowed = [o.name.replace("_", "-") for o in OPTIONS.values() if o.name != "config"]
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in OPTIONS or name == "config":
            raise ConfigError(f"--config {path}: there is no option {key!r}"
                              f"{nearest(key.replace('_', '-'), allowed)}; the options are "
                              f"{', '.join(allowed)}", param=key)
        if name in out:
            raise ConfigError(f"--config {path}: {key!r} is set twice (- and _ are the same)", param=key)
        out[name] = value
    return out


def _parse(option: Option, value: object, source: str) -> object:
    if not option.repeatable:
        return _parse_one(option, value, source)
    many = value if isinstance(value, list) else [value]
    return tuple(_parse_one(option, v, source) for v in many)


def _parse_one(option: Option, value: object, source: str) -> object:
    """One value; from a TOML file it may be a number as well as a text."""
    shown = "(not shown)" if option.name == "api_key" else _shown(value)
    try:
        if isinstance(value, bool) or not isinstance(value, (str, int, Path)):
            raise _Bad("a text or a whole number")
        return option.parse(str(value))
    except _Bad as e:
        hint = ""
        if source.startswith("environment") and str(value).startswith("tcp://"):
            # Kubernetes sets NAME_PORT=tcp://… for a service called "trunkline".
            hint = "; Kubernetes sets this for a service of that name: rename it, or give --port"
        raise ConfigError(f"{option.flag}: {shown} (from the {source}) is not {e}{hint}",
                          param=option.name) from e


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _notes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that look like options and are none. No error: others may have set them."""
    known = [o.env for o in OPTIONS.values()]
    return tuple(
        f"the environment variable {name} is not an option and was ignored{nearest(name, known)}"
        for name in sorted(env)
        if name.startswith(ENV_PREFIX) and name not in known and name not in OTHER_ENV)


def banner(config: ServeConfig) -> list[str]:
    """A line for each option: flag, value, source."""
    rows = []
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        shown = option.default_text if value is None else option.show(value)
        rows.append((option.flag, shown, config.sources.get(name, "default")))
    width = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return [f"  {flag:<{width[0]}}  {value:<{width[1]}}  ({source})" for flag, value, source in rows]
