"""What a chat template can render, found by rendering small conversations and looking for what was put in.

Reading the source would not do: templates mention tools and then refuse them, take a call's arguments as an
object or as text, and drop what they don't know without a word. A handful of renderings of a few messages,
once, when a template is loaded (a few milliseconds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.errors import UnprocessableError
from engine.text.fold import Capabilities

#: render(messages, tools) -> text, or UnprocessableError.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]

#: The `code` of an error that no other conversation would avoid: probing stops.
OVER_BUDGET = "template_over_budget"

_USER = {"role": "user", "content": "probe-question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe-description",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "probe-parameter"}},
            "required": ["probe_key"],
        },
    },
}
#: Nine letters and digits: Mistral's templates refuse any other id.
_CALL_ID = "call00001"
_RESULT = {"role": "tool", "name": "probe_tool", "tool_call_id": _CALL_ID, "content": "probe-result"}
_AS_OBJECT: dict[str, Any] = {"probe_key": "probe-value"}
_AS_TEXT = '{"probe_key": "probe-value"}'


class _OverBudgetError(Exception):
    pass


def probe(render: Render) -> Capabilities:
    """Capabilities of the template behind `render`; none of them if it runs over its budget."""
    try:
        return _probe(render)
    except _OverBudgetError:
        return Capabilities()


def _probe(render: Render) -> Capabilities:
    found = Capabilities(
        tools="probe_tool" in _try(render, [_USER], [_TOOL]),
        system="probe-system" in _try(render, [{"role": "system", "content": "probe-system"}, _USER]),
        user_after_user="probe-second" in _try(render, [_USER, {"role": "user", "content": "probe-second"}]))
    tools = [_TOOL] if found.tools else None
    if "content" in (can := _calls(render, tools)):
        return replace(found, tool_messages=True, arguments=can["arguments"], call_content=can["content"])
    return found


def _calls(render: Render, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The first way of writing a call that comes out whole, with its result; {} if none does."""
    for shape, arguments in (("object", _AS_OBJECT), ("text", _AS_TEXT)):
        for content in ("absent", "empty"):
            text = _try(render, [_USER, _call(arguments, content), _RESULT], tools)
            if _is_whole(text):
                return {"arguments": shape, "content": content}
    return {}


def _call(arguments: Any, content: str) -> dict[str, Any]:
    function = {"name": "probe_tool", "arguments": arguments}
    message: dict[str, Any] = {"role": "assistant"}
    if content == "empty":
        message["content"] = ""
    return {**message, "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}]}


def _is_whole(text: str) -> bool:
    """All that was put in came out, and the arguments neither as Python writes a dict nor escaped twice."""
    there = all(part in text for part in ("probe_tool", "probe_key", "probe-value", "probe-result"))
    return there and "'probe_key'" not in text and '\\"probe_key' not in text


def _try(render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    try:
        return render(messages, tools)
    except UnprocessableError as error:
        if error.code == OVER_BUDGET:
            raise _OverBudgetError from None
        return ""
