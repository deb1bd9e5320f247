"""Tools as text: nothing is lost, and what was sent stays a prefix of what is sent next (PITFALLS 1)."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.fold import INSTRUCTIONS, Capabilities, fold_tools
from engine.text.messages import normalise_messages
from engine.text.template import CHATML, ChatTemplate

CALL = {"role": "assistant", "content": "Let me look.", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "å.py"}}},
    {"id": "2", "type": "function", "function": {"name": "list", "arguments": "not JSON"}}]}
RESULTS = [
    {"role": "tool", "tool_call_id": "1", "content": "x = 1"},
    {"role": "tool", "tool_call_id": "2", "content": "a b"}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def fold(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **can: Any) -> list[dict[str, Any]]:
    folded, native = fold_tools(normalise_messages(messages), tools or [], Capabilities(**can))
    assert native == []
    return folded


def test_calls_and_results_become_text() -> None:
    assert fold([{"role": "user", "content": "q"}, CALL, *RESULTS]) == [
        {"role": "user", "content": "q"},
        {"role": "assistant",
         "content": 'Let me look.\n{"name": "read", "arguments": {"path": "å.py"}}\n'
                    '{"name": "list", "arguments": "not JSON"}'},
        {"role": "user", "content": "Result of read:\nx = 1"},
        {"role": "user", "content": "Result of list:\na b"},
    ]


def test_results_in_a_row_are_one_message_where_users_must_not_follow_users() -> None:
    folded = fold([{"role": "user", "content": "q"}, CALL, *RESULTS], user_after_user=False)
    assert [m["role"] for m in folded] == ["user", "assistant", "user"]
    assert folded[-1]["content"] == "Result of read:\nx = 1\n\nResult of list:\na b"


@pytest.mark.parametrize(
    ("result", "named"),
    [({"name": "grep"}, "grep"), ({"tool_call_id": "unknown"}, "the tool"), ({}, "the tool")])
def test_a_result_is_named_by_itself_or_by_its_call(result: dict[str, str], named: str) -> None:
    folded = fold([CALL, {"role": "tool", "content": "y", **result}])
    assert folded[-1]["content"] == f"Result of {named}:\ny"


@pytest.mark.parametrize(
    ("messages", "system", "first"),
    [
        ([{"role": "system", "content": "Be terse."}], True, ("system", "Be terse.\n\n")),
        ([{"role": "user", "content": "q"}], True, ("system", "")),
        ([{"role": "user", "content": "q"}], False, ("user", "q\n\n")),
        ([{"role": "system", "content": ""}], True, ("system", "")),
    ],
)
def test_definitions_go_to_the_system_message_or_to_the_first_of_a_user(
    messages: list[dict[str, Any]], system: bool, first: tuple[str, str]
) -> None:
    folded = fold(messages, [TOOL], system=system)
    role, before = first
    expected = before + INSTRUCTIONS + '\n\n{"name": "read", "parameters": {"type": "object"}}'
    assert folded[0] == {"role": role, "content": expected}
    assert [m["content"] for m in folded[1:]] == ["q"] * (len(folded) - 1)


def test_what_a_template_knows_is_left_to_it() -> None:
    messages = normalise_messages([CALL, *RESULTS])
    assert fold_tools(messages, [TOOL], Capabilities(tools=True, tool_messages=True)) == (messages, [TOOL])


def test_arguments_and_content_are_shaped_as_a_template_likes_them() -> None:
    call = {"role": "assistant", "tool_calls": CALL["tool_calls"]}
    can = Capabilities(tools=True, tool_messages=True, arguments="text", call_content="empty")
    (shaped,), _ = fold_tools(normalise_messages([call]), [], can)
    assert shaped["content"] == ""
    assert [c["function"]["arguments"] for c in shaped["tool_calls"]] == ['{"path": "å.py"}', "not JSON"]


def test_the_client_s_messages_are_left_alone() -> None:
    message = {"role": "system", "content": "Be terse."}
    fold([message, CALL, *RESULTS], [TOOL])
    assert message == {"role": "system", "content": "Be terse."}
    assert "tool_calls" in CALL


def test_each_turn_is_a_prefix_of_the_next(
    smollm2_template: ChatTemplate, transcripts: list[list[dict[str, Any]]], tools: list[dict[str, Any]]
) -> None:
    """At every message of real transcripts, with and without definitions; and with its generation prompt where the
    assistant's own message follows."""
    for template in (smollm2_template, ChatTemplate.from_source(CHATML, {})):
        for given in (None, tools):
            for messages in transcripts:
                _assert_grows(template, messages, given)


def _assert_grows(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    before = template.render_chat(messages[:1], tools=tools, add_generation_prompt=False)
    for n in range(1, len(messages)):
        after = template.render_chat(messages[: n + 1], tools=tools, add_generation_prompt=False)
        assert after.startswith(before)
        assert len(after) > len(before)
        if messages[n]["role"] == "assistant":
            assert after.startswith(template.render_chat(messages[:n], tools=tools))
        before = after


def test_every_part_of_a_transcript_is_in_the_text(
    smollm2_template: ChatTemplate, transcripts: list[list[dict[str, Any]]], tools: list[dict[str, Any]]
) -> None:
    for messages in transcripts:
        text = smollm2_template.render_chat(messages, tools=tools)
        assert all(m["content"] in text for m in messages if m["content"])
        assert all(tool["function"]["description"] in text for tool in tools)
        calls = [c["function"]["name"] for m in messages for c in m.get("tool_calls") or ()]
        assert text.count('\n{"name": "') >= len(calls)
