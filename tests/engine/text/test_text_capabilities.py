"""Every template of the collection renders a conversation with tools, through itself or folded."""

from __future__ import annotations

from typing import Any

import pytest
from text_helpers import SHARED, shared

from engine.errors import UnprocessableError
from engine.text.fold import Capabilities
from engine.text.template import CHATML, ChatTemplate

TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}},
                   "required": ["city"]}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "abcdefgh1", "type": "function",
         "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "12 degrees"},
    {"role": "assistant", "content": "It is 12 degrees."},
    {"role": "user", "content": "Thanks"},
]
WORDS = ("You are terse.", "Weather in Oslo?", "get_weather", "Weather of a city", "Oslo", "12 degrees",
         "It is 12 degrees.", "Thanks")

#: Templates that can't: what they say instead.
REFUSE = {
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",  # wants its own names for tools and date
    "google-gemma-2-2b-it": "System role not supported",
}
#: Templates that lose part of the conversation, whoever renders them: none is known.
#: Templates whose calls and results are folded, since they know none, or only in a way that fails: no place for
#: calls (SmolLM3, LFM2, RWKV, Phi, Granite 3.3, Apriel), content that must be null (R1), list.append (Kimi).
FOLDED = {
    "Apriel-1.6-15b-Thinker-fixed", "HuggingFaceTB-SmolLM3-3B", "Kimi-K2-Instruct", "LFM2-8B-A1B",
    "LFM2.5-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct", "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct", "unsloth-Apriel-1.5",
}
NAMES = sorted(path.stem for path in (SHARED / "templates").glob("*.jinja")) or ["Qwen-Qwen3-0.6B"]


def load(name: str) -> ChatTemplate:
    source = shared(f"templates/{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate.from_source(source, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_conversation_comes_out_whole(name: str) -> None:
    template = load(name)
    assert template.capabilities.tool_messages is (name not in FOLDED)
    if name in REFUSE:
        with pytest.raises(UnprocessableError, match=REFUSE[name]):
            template.render_chat(CHAT, tools=TOOLS)
        return
    text = template.render_chat(CHAT, tools=TOOLS)
    assert [word for word in WORDS if word not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_call_renders_the_same_however_its_arguments_are_spelled(name: str) -> None:
    if name in REFUSE:
        pytest.skip("refuses this conversation")
    template = load(name)
    texts = set()
    for arguments in ('{"city": "Oslo"}', '{"city":"Oslo"}', ' {\n"city" : "Oslo"}', {"city": "Oslo"}):
        function = {"name": "get_weather", "arguments": arguments}
        call = {"role": "assistant", "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}]}
        texts.add(template.render_chat([*CHAT[:2], call, *CHAT[3:]], tools=TOOLS))
    assert len(texts) == 1


def calling(how: str) -> str:
    return (
        "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.name }}" + how + "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (CHATML, Capabilities(tools=False, tool_messages=False)),
        (calling("{{ c.function.arguments | tojson }}"), Capabilities(True, True, "object")),
        (calling("{{ c.function.arguments }}"), Capabilities(True, True, "text")),  # an object would show as Python's
        (calling("{{ '(' + c.function.arguments + ')' }}"), Capabilities(True, True, "text")),
        (calling("{{ m.content.strip() }}{{ c.function.arguments | tojson }}"),
         Capabilities(True, True, "object", "empty")),
        ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
         "{{ m.content }}{% endfor %}", Capabilities()),
        ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
         "{% endif %}{{ m.content }}{% endfor %}", Capabilities(system=False, user_after_user=False)),
    ],
)
def test_capabilities_are_found_by_rendering(source: str, found: Capabilities) -> None:
    template = ChatTemplate.from_source(source, {})
    assert template.capabilities == found
    assert template.knows_tools is (found.tools and found.tool_messages)
