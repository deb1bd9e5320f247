"""The jinja2 environment that chat templates run in: Hugging Face's additions, and an end to every rendering.

Knows jinja2. Does not know messages or models. A template is code that came with a model's files: the
sandbox keeps it from the machine, and a budget of time and characters keeps it from running for ever. The
budget is asked at each turn of each loop, at each call and at each piece of output, so Python's own thread
is enough: nothing has to be killed. What a request holds, and mistakes in a template, are bounded; a
template written to eat memory with nested lists is not, and is the operator's choice as any code is.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: A rendered transcript of a million tokens is about 4 million characters; what is much longer is a loop.
MAX_CHARS = 64 * 1024 * 1024
#: Bits of the largest integer that `*` and `**` may make.
MAX_BITS = 4096
#: Turns of loops between two looks at the clock: a few microseconds of work.
TURNS_PER_LOOK = 64


class OverBudgetError(Exception):
    """A rendering took too long, or grew too large. The message completes "the chat template …"."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still use. `deadline` is in the seconds of `clock`."""

    deadline: float
    limit_s: float
    clock: Callable[[], float]
    turns: int = 0

    def tick(self) -> None:
        self.turns += 1
        if self.turns % TURNS_PER_LOOK == 0 and self.clock() > self.deadline:
            raise OverBudgetError(
                f"was still running after {self.limit_s:g} s, in turn {self.turns:,} of its loops")


class _Generation(Extension):
    """{% generation %}…{% endgeneration %}, which marks training targets; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _BoundedCode(CodeGenerator):
    """`a ~ b` goes through the environment, so that its length is known."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_text((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Transformers' environment for chat templates (version 5.24 was read), with a budget.

    Render inside `with sandbox.bounded(budget)`. One environment serves many threads, each with its own
    budget. `now` is what strftime_now tells.
    """

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._local = threading.local()
        self.filters["tojson"] = _tojson
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=lambda format: now().strftime(format),
            dict=_Dict(), namespace=_Namespace)
        del self.globals["lipsum"]
        for name in ("center", "indent", "wordwrap", "batch", "slice", "round"):
            self.filters[name] = _with_small_numbers(self.filters[name])

    @contextmanager
    def bounded(self, budget: Budget) -> Iterator[None]:
        self._local.budget = budget
        try:
            yield
        finally:
            self._local.budget = None

    @property
    def tick(self) -> bool:
        """True, or OverBudgetError. A property: compiled templates name it as a statement, without a call."""
        self.spend()
        return True

    def spend(self) -> None:
        budget: Budget | None = getattr(self._local, "budget", None)
        if budget is not None:
            budget.tick()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick")).set_lineno(loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(nodes.EnvironmentAttribute("tick"), loop.test).set_lineno(loop.lineno)
        tree.set_environment(self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.spend()
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_numbers(args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend()
        _CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        """What jinja2 calls wherever it joins output."""
        pieces = list(parts)
        _check_length(sum(map(len, pieces)))
        return "".join(pieces)

    def join_text(self, parts: Iterable[Any]) -> str:
        return self.concat(map(str, parts))


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    """jinja2's own escapes HTML; Transformers' does not, and templates count on it."""
    if indent is not None:
        _check_numbers((indent,))
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)` that holds no name with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}: names begin with a letter")


def _check_length(length: int) -> None:
    if length > MAX_CHARS:
        raise OverBudgetError(f"made {length:,} characters; {MAX_CHARS:,} is the most")


def _check_numbers(values: Iterable[Any]) -> None:
    """Widths and counts: str.ljust(10 ** 9) is a gigabyte in one step, which no budget sees."""
    for value in values:
        if isinstance(value, int):
            _check_length(value)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args[1:])
        _check_numbers(kwargs.values())
        return function(*args, **kwargs)

    return checked


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_length(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            _check_length(len(many) * times)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverBudgetError(f"calculated a number of {bits:,} bits; {MAX_BITS:,} is the most")


_CHECKS: dict[str, Callable[[Any, Any], None]] = {"+": _check_sum, "*": _check_product, "**": _check_power}
