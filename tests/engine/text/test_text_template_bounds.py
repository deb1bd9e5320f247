"""Every rendering ends, and its error says what happened."""

from __future__ import annotations

import threading

import pytest

from engine.errors import ModelError, RequestError, UnprocessableError
from engine.text import sandbox
from engine.text.capabilities import OVER_BUDGET
from engine.text.template import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]


class Clock:
    """A tenth of a second goes by at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": NESTED,
    "loops that never reach their end": NESTED.replace("{% endfor %}", "{% continue %}{% endfor %}"),
    "loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a filter that lets nothing through":
        "{% for a in range(99999) if false %}{% endfor %}" * 50,
    "filters in a loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "inside a macro":
        "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}{% endmacro %}"
        "{{ m() }}",
    "macros that call macros":
        "{% macro a() %}{{ '' }}{% endmacro %}{% macro b() %}" + "{{ a() }}" * 50 + "{% endmacro %}{% macro c() %}"
        + "{{ b() }}" * 50 + "{% endmacro %}" + "{{ c() }}" * 50,
    "inside a set block": "{% set x %}" + NESTED + "{% endset %}",
    "inside generation": "{% generation %}" + NESTED + "{% endgeneration %}",
    "recursive loops": "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_loop_ends_at_its_deadline(source: str) -> None:
    template = ChatTemplate.from_source("{% if go %}" + source + "{% endif %}", {}, clock=Clock())
    assert template.render(CHAT) == ""
    with pytest.raises(UnprocessableError, match=r"still running after 2 s, in turn [\d,]+ of its loops") as error:
        template.render(CHAT, go=True)
    assert error.value.code == OVER_BUDGET
    assert error.value.status == 422


def test_a_loop_ends_by_the_real_clock() -> None:
    template = ChatTemplate.from_source("{% if go %}" + ENDLESS["nested loops"] + "{% endif %}", {})
    with pytest.raises(UnprocessableError, match=r"after 0\.05 s"):
        template.render(CHAT, deadline_s=0.05, go=True)


def test_a_template_that_always_loops_can_be_loaded_and_refuses_chats() -> None:
    template = ChatTemplate.from_source(ENDLESS["nested loops"], {}, clock=Clock())
    assert not template.knows_tools
    with pytest.raises(UnprocessableError, match="still running"):
        template.render_chat(CHAT)


HUGE = {
    "a product": "{{ 'x' * 999999999 }}",
    "a product of lists": "{{ [1] * 999999999 }}",
    "doubling by ~": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling in a set block":
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% endfor %}",
    "doubling in a macro":
        "{% macro m(n) %}{% if n %}{{ m(n - 1) * 2 }}{% else %}x{% endif %}{% endmacro %}{{ m(60) }}",
    "long output": "{% for i in range(99999) %}{{ messages[0].content * 99999 }}{% endfor %}",
    "padding": "{{ 'x'.ljust(999999999) }}",
    "centring": "{{ 'x' | center(999999999) }}",
    "indenting": "{{ 'a\\nb' | indent(999999999) }}",
    "indented JSON": "{{ messages | tojson(indent=999999999) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "products of numbers":
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_what_grows_too_large_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CHARS", 1_000_000)
    monkeypatch.setattr("engine.text.template.MAX_CHARS", 1_000_000)
    template = ChatTemplate.from_source("{% if go %}" + source + "{% endif %}", {})
    with pytest.raises(UnprocessableError, match=r"is the most|wrote more than") as error:
        template.render(CHAT, go=True)
    assert error.value.code == OVER_BUDGET


def test_a_range_is_bounded_as_jinja_bounds_it() -> None:
    with pytest.raises(UnprocessableError, match="Range too big"):
        ChatTemplate.from_source("{% for i in range(10 ** 9) %}{% endfor %}", {}).render(CHAT)


def test_endless_recursion_is_named() -> None:
    template = ChatTemplate.from_source("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {})
    with pytest.raises(UnprocessableError, match="calls itself without end"):
        template.render(CHAT)


def test_what_a_template_says_is_told() -> None:
    template = ChatTemplate.from_source("{{ raise_exception('Roles must alternate!') }}", {})
    with pytest.raises(UnprocessableError, match="refuses these messages: Roles must alternate!"):
        template.render_chat(CHAT)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("\n{{ messages[0].a.b }}", r"failed in line 2: 'dict object' has no attribute 'a' \(UndefinedError\)"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ nothing() }}", "'nothing' is undefined"),
    ],
)
def test_a_failure_is_told_with_its_line(source: str, told: str) -> None:
    with pytest.raises(UnprocessableError, match=told):
        ChatTemplate.from_source(source, {}).render_chat(CHAT)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("a\n{% for m in %}", "line 2"),
        ("{% if x %}", "line 1"),
        ("{% frobnicate %}", "unknown tag 'frobnicate'"),
        ("{{ '" + "x", "line 1"),
        ("{{ x | frobnicate }}", "frobnicate"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "nested too deeply"),
    ],
)
def test_broken_source_is_told_when_it_is_loaded(source: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        ChatTemplate.from_source(source, {})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "deadline_s"])
def test_kwargs_can_not_replace_a_field_of_the_request(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        ChatTemplate.from_source("x", {}).render_chat(CHAT, template_kwargs={name: 1})


def test_each_thread_has_its_own_budget() -> None:
    """One rendering over its budget takes nothing from another of the same template."""
    template = ChatTemplate.from_source(
        "{% for i in range(2000) %}{% for j in range(99999 if go else 1) %}{% endfor %}{% endfor %}done", {})
    inside, results = threading.Barrier(2), []

    def endless() -> None:
        inside.wait()
        with pytest.raises(UnprocessableError):
            template.render(CHAT, deadline_s=0.2, go=True)
        results.append("ended")

    thread = threading.Thread(target=endless)
    thread.start()
    inside.wait()
    for _ in range(20):
        assert template.render(CHAT, deadline_s=60) == "done"
    thread.join()
    assert results == ["ended"]


def test_messages_of_the_caller_are_left_alone() -> None:
    template = ChatTemplate.from_source("{% set m = messages[0] %}{{ m.content }}", {})
    message = {"role": "user", "content": "Hi", "name": None}
    template.render([message])
    assert message == {"role": "user", "content": "Hi", "name": None}
