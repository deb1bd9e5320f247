"""OpenAI's messages and tools, checked and brought to the one shape that templates and folding read. No
torch.

Knows the wire shape of chat requests. Does not know templates. What comes out of `normalise_messages`:

    role        "system" | "user" | "assistant" | "tool"
    content     str; absent where an assistant message only calls tools
    tool_calls  [{"id"?, "type": "function", "function": {"name": str, "arguments": dict | str}}], never empty
    …           every other key of the client's that is not null (name, tool_call_id, reasoning_content, …)

Errors are RequestError, and name the message's index and the value.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import RequestError

#: What clients say -> what templates know. OpenAI renamed "system" and "function" in later versions.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}
#: Kinds of content parts that hold text; the last two are those of /v1/responses.
TEXT_PARTS = ("text", "input_text", "output_text")
#: Keys of a message, beside role and content, that are read here and not by templates alone.
TEXT_KEYS = ("name", "tool_call_id")
#: Text parts are set on lines of their own: clients split where a paragraph ends, and drop the line break.
PART_SEPARATOR = "\n"
#: An excerpt of a client's value in a message of ours.
SHOWN_CHARS = 60


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """New dicts as described above; the client's own are left alone. Raises RequestError."""
    if not isinstance(messages, list) or not messages:
        shown = "an empty list" if messages == [] else _shown(messages)
        raise RequestError(f"messages is {shown}: at least one message is needed.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalise_tools(tools: Any) -> list[dict[str, Any]]:
    """Tool definitions, each {"type": "function", "function": {"name": …, …}}; None is []. Raises
    RequestError.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError(f"tools is {_shown(tools)}: a list of tools is needed.", param="tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, at: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise RequestError(
            f'{at} is {_shown(tool)}: only {{"type": "function", "function": {{…}}}} is known.', param=at)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(
            f"{at}.function.name is {_shown(function.get('name'))}: a name is needed.", param=at)
    return {**tool, "type": "function"}


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{at} is {_shown(message)}: an object with role and content is needed.", param=at)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(
            f"{at}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}.", param=f"{at}.role")
    out = {key: value for key, value in message.items() if value is not None}
    out["role"] = ROLES[role]
    for key in TEXT_KEYS:
        if not isinstance(out.get(key, ""), str):
            raise RequestError(f"{at}.{key} is {_shown(out[key])}: a string is needed.", param=f"{at}.{key}")
    calls = _calls(out, at)
    out.pop("function_call", None)
    out.pop("tool_calls", None)
    if calls:
        out["tool_calls"] = calls
    if "content" in out:
        out["content"] = _text(out["content"], f"{at}.content")
    elif not calls:
        raise RequestError(
            f"{at}.content is missing: a message of role {role!r} needs text"
            f"{' or tool_calls' if role == 'assistant' else ''}.", param=f"{at}.content")
    return out


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at} is {_shown(content)}: text, or a list of text parts, is needed.", param=at)
    return PART_SEPARATOR.join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else part
    if kind not in TEXT_PARTS:
        raise RequestError(
            f'{at} is of type {_shown(kind)}: this server takes text only. Send {{"type": "text", …}} parts.',
            param=at)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{at}.text is {_shown(part.get('text'))}: a string is needed.", param=at)
    return str(part["text"])


def _calls(message: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """Tool calls of either vintage: tool_calls, or the older function_call."""
    calls = message.get("tool_calls", [])
    if "function_call" in message and not calls:
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls and message["role"] != "assistant":
        raise RequestError(
            f"{at}.tool_calls is in a message of role {message['role']!r}: only an assistant calls tools.",
            param=at)
    if not isinstance(calls, list):
        raise RequestError(f"{at}.tool_calls is {_shown(calls)}: a list is needed.", param=f"{at}.tool_calls")
    return [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{at} is {_shown(call)}: an object with function.name is needed.", param=at)
    arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, at: str) -> dict[str, Any] | str:
    """An object, however the client spelled it, so that one call renders in one way; broken JSON stays
    text.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise RequestError(f"{at} is {_shown(arguments)}: an object, or JSON as text, is needed.", param=at)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
