"""Messages of every vintage come out in one shape; what can't be read is refused with its index and value."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import RequestError
from engine.text.messages import normalise_messages, normalise_tools

ASSISTANT = {"role": "assistant", "content": None}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("message", "out"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "function", "name": "f", "content": "a"}, {"role": "tool", "name": "f", "content": "a"}),
        ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "a", "name": None, "x": 1}, {"role": "user", "content": "a", "x": 1}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]},
         {"role": "user", "content": "a\nb\nc"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": []},
         {"role": "assistant", "content": "a", "reasoning_content": "r"}),
        ({"role": "assistant", "content": "a", "tool_calls": None}, {"role": "assistant", "content": "a"}),
    ],
)
def test_shapes(message: dict[str, Any], out: dict[str, Any]) -> None:
    assert normalise_messages([message]) == [out]


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), (' {"a":1} ', {"a": 1}), ("", {}), (None, {}), ("{}", {}),
        ('{"a": ', '{"a": '), ("[1]", "[1]"), ("plain", "plain"), ('{"é": "\\u00e9"}', {"é": "é"}),
    ],
)
def test_arguments_are_an_object_if_they_can_be(arguments: Any, out: Any) -> None:
    (message,) = normalise_messages([{**ASSISTANT, "tool_calls": [call(arguments)]}])
    assert message == {"role": "assistant", "tool_calls": [call(out)]}


def test_the_older_function_call_is_a_tool_call() -> None:
    (message,) = normalise_messages([{**ASSISTANT, "function_call": {"name": "f", "arguments": '{"a": 1}'}}])
    assert message == {
        "role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}


def test_the_client_s_own_are_left_alone() -> None:
    message = {**ASSISTANT, "tool_calls": [call('{"a": 1}')]}
    normalise_messages([message])
    assert message == {**ASSISTANT, "tool_calls": [call('{"a": 1}')]}


GOOD = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages is an empty list"),
        (None, "messages is null"),
        ("hi", 'messages is "hi"'),
        ([GOOD, "hi"], r'messages\[1\] is "hi"'),
        ([{"content": "a"}], r"messages\[0\]\.role is null"),
        ([GOOD, {"role": "wizard", "content": "a"}], r'messages\[1\]\.role is "wizard"; it must be one of system,'),
        ([{"role": ["user"], "content": "a"}], r'role is \["user"\]'),
        ([{"role": "user"}], r"messages\[0\]\.content is missing: a message of role 'user' needs text\."),
        ([ASSISTANT], "needs text or tool_calls"),
        ([{"role": "tool", "content": None}], "content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
         r'messages\[0\]\.content\[0\] is of type "image_url": this server takes text only'),
        ([{"role": "user", "content": [{"text": "a"}]}], r"content\[0\] is of type null"),
        ([{"role": "user", "content": [7]}], "is of type 7"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\]\.text is 5"),
        ([{**GOOD, "tool_calls": [call({})]}], "only an assistant calls tools"),
        ([{**ASSISTANT, "tool_calls": {"a": 1}}], "a list is needed"),
        ([{**ASSISTANT, "tool_calls": [{"id": "1"}]}], r"messages\[0\]\.tool_calls\[0\] is .*function\.name"),
        ([{**ASSISTANT, "tool_calls": [call(5)]}], r"tool_calls\[0\]\.function\.arguments is 5"),
        ([{"role": "user", "content": {"a": "x" * 500}}], r"xxx…: text, or a list"),
    ],
)
def test_what_can_not_be_read_is_named(messages: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told) as error:
        normalise_messages(messages)
    assert error.value.status == 400
    assert (error.value.param or "").startswith("messages")
    assert len(error.value.message) < 300


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("x", 'tools is "x"'),
        ([5], r"tools\[0\] is 5"),
        ([{"type": "web_search"}], r'tools\[0\] is {"type": "web_search"}'),
        ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name is null"),
    ],
)
def test_tools_that_can_not_be_read_are_named(tools: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        normalise_tools(tools)


def test_tools_come_out_as_they_went_in() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    assert normalise_tools([tool]) == [tool]
    assert normalise_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]
    assert normalise_tools(None) == []
