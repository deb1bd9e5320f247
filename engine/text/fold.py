"""Tools as plain text, for templates that know none: definitions, calls and results become text messages.
No torch.

Knows the shape that messages.py gives. Does not know templates: `Capabilities` says what one can do. What is
written depends on the message itself and on the messages before it only, so turn N's text is a prefix of turn
N+1's, as it must be for a cache.

    definitions  at the end of the system message (of the first user message, if the template has none)
    a call       a line of JSON in the assistant's text:  {"name": "read_file", "arguments": {"path": "a.py"}}
    a result     a user message:  Result of read_file:\\n…
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]

INSTRUCTIONS = (
    "You can call the tools below. To call one, answer with one line of JSON and nothing else: "
    '{"name": "the tool\'s name", "arguments": {…}}. Its result comes in the next message.'
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a template can render, as found by rendering (capabilities.py).

    tools: definitions.  tool_messages: calls and results.  arguments: how it wants a call's arguments.
    call_content: whether an assistant message that only calls may have no content.  system: system messages.
    user_after_user: two user messages in a row.
    """

    tools: bool = False
    tool_messages: bool = False
    arguments: Literal["object", "text"] = "object"
    call_content: Literal["absent", "empty"] = "absent"
    system: bool = True
    user_after_user: bool = True


def fold_tools(
    messages: list[Message], tools: list[dict[str, Any]], can: Capabilities
) -> tuple[list[Message], list[dict[str, Any]]]:
    """(messages, tools) such that a template of these capabilities renders all of them; new dicts where
    changed.
    """
    out = [_shaped(m, can) for m in messages] if can.tool_messages else _folded(messages, can)
    if tools and not can.tools:
        out, tools = _with_definitions(out, tools, can), []
    return out, tools


def _shaped(message: Message, can: Capabilities) -> Message:
    """A call as this template likes it."""
    if not (calls := message.get("tool_calls")):
        return message
    if can.arguments == "text":
        message = {**message, "tool_calls": [_with_text(call) for call in calls]}
    if can.call_content == "empty" and "content" not in message:
        message = {**message, "content": ""}
    return message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = _json(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _folded(messages: list[Message], can: Capabilities) -> list[Message]:
    names: dict[str, str] = {}
    out: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        folded = _as_text(message, names)
        if folded["role"] == "user" and out and out[-1]["role"] == "user" and not can.user_after_user:
            out[-1] = {**out[-1], "content": out[-1]["content"] + "\n\n" + folded["content"]}
        else:
            out.append(folded)
    return out


def _as_text(message: Message, names: dict[str, str]) -> Message:
    if message["role"] == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id", ""), "the tool")
        return {"role": "user", "content": f"Result of {name}:\n{message['content']}"}
    if not (calls := message.get("tool_calls")):
        return message
    lines = [message["content"]] if message.get("content") else []
    lines += [_json({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}) for c in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(lines)}


def _with_definitions(
    messages: list[Message], tools: list[dict[str, Any]], can: Capabilities
) -> list[Message]:
    text = "\n\n".join([INSTRUCTIONS, *(_json(tool["function"]) for tool in tools)])
    home = "system" if can.system else "user"
    at = next((i for i, m in enumerate(messages) if m["role"] == home), None)
    if at is None:
        return [{"role": home, "content": text}, *messages]
    host = messages[at]
    content = f"{host['content']}\n\n{text}" if host["content"] else text
    return [*messages[:at], {**host, "content": content}, *messages[at + 1 :]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
