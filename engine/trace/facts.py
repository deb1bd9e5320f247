"""Nested counters as tables: what `/v1/cache/stats` says, drawn without knowing its keys.

A key's ending tells its unit (`bytes`, `_s`, `_ms`, `ratio`). A section whose values are all objects is
a table with a row for each, where what is nested in one has a dotted name; anything else is a list of dotted names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

Facts = Mapping[str, Any]

_WIDTH = 100
#: Room for the names of rows and the frame; what is left must hold the names of columns.
_NAME = 20
_DEPTH = 6
_MOST = 1e300


def show_facts(facts: Facts, before: Facts | None = None) -> RenderableType:
    """`facts` as panels, a section each; with `before`, what grew since is shown behind the number."""
    grown = _growth(facts, before or {})
    sections = {k: v for k, v in facts.items() if isinstance(v, Mapping) and v}
    plain = {k: v for k, v in facts.items() if k not in sections}
    panels = [_panel("server", _pairs(plain, "", grown))] if plain else []
    panels += [_panel(str(name), _section(section, str(name), grown)) for name, section in sections.items()]
    return Group(*panels)


def _panel(title: str, body: RenderableType) -> RenderableType:
    return Panel(body, title=f"[bold]{escape(title)}", title_align="left", width=_WIDTH, padding=(0, 1))


def _section(section: Facts, path: str, grown: Mapping[str, float]) -> RenderableType:
    if all(isinstance(v, Mapping) and v for v in section.values()):
        return _rows(section, path, grown)
    return _pairs(section, path, grown)


def _rows(section: Facts, path: str, grown: Mapping[str, float]) -> RenderableType:
    """One row an entry, one column a key; turned where there are more keys than a line holds."""
    rows = {str(name): dict(flat(row, _DEPTH - 1)) for name, row in section.items()}
    keys = _in_order(rows.values())
    cell = {(r, k): _cell(k, v, f"{path}.{r}.{k}", grown) for r, row in rows.items() for k, v in row.items()}
    names = [str(r) for r in section]
    wide = len(keys) > 8 or sum(len(k) + 2 for k in keys) > _WIDTH - _NAME
    across, down = (names, keys) if wide else (keys, names)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in across:
        table.add_column(escape(name), justify="right")
    for name in down:
        cells = [cell.get((a, name) if wide else (name, a), "") for a in across]
        table.add_row(f"[dim]{escape(name)}" if wide else escape(name), *cells)
    return table


def _in_order(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """All keys, each once; one that only some rows have stands behind the one that it follows there, so that a
    tier's reasons for eviction stay together. What is empty in one row and has names below it in another is no key."""
    keys: list[str] = []
    full: set[str] = set()
    for row in rows:
        at = 0
        for key, value in row.items():
            if key not in keys:
                keys.insert(at, key)
            at = keys.index(key) + 1
            if value != {}:
                full.add(key)
    return [k for k in keys if k in full or not any(other.startswith(f"{k}.") for other in keys)]


def _pairs(section: Facts, path: str, grown: Mapping[str, float]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in flat(section):
        full = f"{path}.{name}" if path else name
        table.add_row(f"[dim]{escape(name)}", _cell(name, value, full, grown))
    return table


def _cell(key: str, value: object, full: str, grown: Mapping[str, float]) -> str:
    text = escape(humanised(key, value))
    return f"{text} [green]+{humanised(key, grown[full])}[/]" if full in grown else text


def flat(facts: Facts, depth: int = _DEPTH) -> Iterator[tuple[str, object]]:
    """Leaves with dotted names; a list is a leaf, and so is what lies deeper than `depth`."""
    for key, value in facts.items():
        if isinstance(value, Mapping) and value and depth > 1:
            yield from ((f"{key}.{name}", leaf) for name, leaf in flat(value, depth - 1))
        else:
            yield str(key), value


def humanised(key: str, value: object) -> str:
    """A value with the unit that the end of its key names."""
    last = key.rsplit(".", 1)[-1]
    if value is None or value == {} or value == []:
        return "–"
    if not _is_number(value):
        return str(value)
    if "bytes" in last:
        return human_bytes(value) + ("/s" if last.endswith(("_s", "_per_s")) else "")
    if last.endswith(("ratio", "rate")) and 0 <= value <= 1:
        return f"{value:.1%}"
    short = ",.3g" if isinstance(value, float) and abs(value) < 100 else ",.0f"
    return format(value, short) + next((unit for end, unit in _UNITS.items() if last.endswith(end)), "")


_UNITS = {"tok_s": " tok/s", "tokens_s": " tok/s", "_per_s": "/s", "_ms": " ms", "_us": " µs", "_s": " s"}


def human_bytes(count: float) -> str:
    """Binary units, three digits: 1536 → 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    if unit == "B":
        return f"{count:,.0f} B"
    return f"{count:,.{max(0, 3 - len(str(int(abs(count)))))}f} {unit}"


def _growth(facts: Facts, before: Facts) -> dict[str, float]:
    old, new = _numbers(before), _numbers(facts)
    return {name: value - old[name] for name, value in new.items() if name in old and value > old[name]}


def _numbers(facts: Facts) -> dict[str, float]:
    return {name: value for name, value in flat(facts)
            if _is_number(value)}


def _is_number(value: object) -> TypeGuard[int | float]:
    """One that can be calculated with: JSON may hold 1e999, NaN, and whole numbers beyond every float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
