"""Rendered text is what Transformers' `apply_chat_template` renders, for real transcripts."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from typing import Any

import pytest
from text_helpers import hf_files, hf_reference, shared

from engine.errors import RequestError, UnprocessableError
from engine.text.template import ChatTemplate, load_template
from engine.text.tokenizer import load_tokenizer

Messages = list[dict[str, Any]]


def as_transformers_wants(messages: Messages) -> Messages:
    """Arguments as objects, and a text where there is none: its documentation's shape of a call."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        message["content"] = message["content"] or ""
    return messages


def prompts(messages: Messages) -> list[Messages]:
    """What an agent sends: all before each assistant message, here every third of them, and the whole."""
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return [messages[:i] for i in [*ends[::3], len(messages)]]


def texts(messages: Messages) -> Messages:
    """A transcript's messages that are nothing but text."""
    return [{"role": m["role"], "content": m["content"]} for m in messages if m["content"] and m["role"] != "tool"]


SOURCES = {"qwen3": "Qwen-Qwen3-0.6B.jinja", "llama3_1": "meta-llama-Llama-3.1-8B-Instruct.jinja"}


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
@pytest.mark.parametrize("with_tools", [True, False])
def test_transcripts_with_tool_calls(
    name: str, with_tools: bool, transcripts: list[Messages], tools: list[dict[str, Any]]
) -> None:
    theirs = hf_reference(hf_files(name))
    source = shared(f"templates/{SOURCES[name]}").read_text(encoding="utf-8")
    ours = ChatTemplate.from_source(source, theirs.special_tokens_map)
    assert ours.knows_tools
    given = tools if with_tools else None
    for messages in transcripts:
        for prompt in prompts(messages):
            reference = theirs.apply_chat_template(
                as_transformers_wants(prompt), tools=given, chat_template=source, tokenize=False,
                add_generation_prompt=True)
            assert ours.render_chat(prompt, tools=given) == reference


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3"])
def test_a_folder_s_own_template(name: str, transcripts: list[Messages]) -> None:
    files = hf_files(name)
    ours, theirs = load_template(files, None, load_tokenizer(files)), hf_reference(files)
    assert ours.source == theirs.chat_template
    for messages in transcripts:
        plain = texts(messages)
        assert ours.render_chat(plain) == theirs.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True)


def test_smollm2_s_own_template(smollm2_template: ChatTemplate, transcripts: list[Messages]) -> None:
    """It knows no tools: the texts alone are compared (folding has its own tests)."""
    theirs = hf_reference(hf_files("qwen3"))
    for messages in transcripts:
        plain = texts(messages)
        for n in (1, 2, len(plain)):
            for generate in (True, False):
                reference = theirs.apply_chat_template(
                    plain[:n], chat_template=smollm2_template.source, tokenize=False, add_generation_prompt=generate)
                assert smollm2_template.render_chat(plain[:n], add_generation_prompt=generate) == reference


def test_smollm2_prompt_by_hand(smollm2_template: ChatTemplate) -> None:
    assert smollm2_template.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("last", ["Well, I", "Well, I ", "Well,\n\n", " x", ""])
@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_continuing_the_final_message(name: str, last: str) -> None:
    files = hf_files(name)
    theirs = hf_reference(files)
    ours = ChatTemplate.from_source(theirs.chat_template, load_tokenizer(files).special_tokens)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": last}]
    reference = theirs.apply_chat_template(
        messages, tokenize=False, continue_final_message=True)
    assert ours.render_chat(messages, continue_final_message=True) == reference
    assert messages[-1]["content"] == last


def test_what_can_not_be_continued_is_refused(smollm2_template: ChatTemplate) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="both true"):
        smollm2_template.render(chat, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="no text to continue"):
        smollm2_template.render([{"role": "assistant"}], continue_final_message=True)
    drops = ChatTemplate.from_source("{% for m in messages %}{{ m['role'] }}{% endfor %}", {})
    with pytest.raises(UnprocessableError, match="nothing to continue"):
        drops.render_chat(chat, continue_final_message=True)


#: Each line is one of Hugging Face's additions, or a place where jinja2's own default would differ.
PIECES = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{{ '<é & \"x\">' | tojson }}{{ '\\u4e2d' | tojson(ensure_ascii=true) }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}a{% endgeneration %}{{ x }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['k'], 3) }}",
    "  {% if true %}\n  x\n  {% endif %}\n  y",
    "{%- macro f(a, b=2) -%}{{ a ~ b }}{%- endmacro -%}{{ f(1) }}{{ f('x', none) }}",
    "{{ messages[0].nothing }}|{{ messages[0].nothing is defined }}|{{ documents }}|{{ tools }}",
    "{{ bos_token }}|{{ extra }}|{{ add_generation_prompt }}",
    "{{ 'a' ~ 1 ~ none ~ [1] }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ '%s-%d' % ('a', 3) }}",
    "{{ '{} {x}'.format(1, x=2) }}{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ 'x'.ljust(4) }}{{ 'x' | center(5) }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ 'a\\nb' | indent(2) }}{{ messages | length }}",
    "{% set s %}{{ messages[0].content }}!{% endset %}{{ s }}{{ s | upper }}",
    "{% filter upper %}abc{% endfilter %}{{ range(5) | list }}{{ 7 // 2 }}{{ 1 / 4 }}{{ -3 % 5 }}",
    "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}",
    "{{ strftime_now('%d %b %Y') }}",
]


@pytest.mark.parametrize("source", PIECES)
def test_additions_to_jinja(source: str) -> None:
    theirs = hf_reference(hf_files("llama3_1"))
    messages = [
        {"role": "user", "content": "q <b>", "reasoning": "hm", "null": None},
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "é"}]
    reference = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, extra="E")
    ours = ChatTemplate.from_source(source, {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token})
    assert ours.render(messages, add_generation_prompt=False, extra="E") == reference


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system, please') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + 1 }}",
        "{% include 'x' %}",
    ],
)
def test_what_transformers_refuses_is_refused(source: str) -> None:
    theirs = hf_reference(hf_files("llama3_1"))
    messages = [{"role": "user", "content": "q"}]
    with pytest.raises(Exception) as reference:
        theirs.apply_chat_template(messages, chat_template=source, tokenize=False)
    with pytest.raises(UnprocessableError) as ours:
        ChatTemplate.from_source(source, {}).render(messages)
    assert str(reference.value) in ours.value.message


def test_a_namespace_holds_no_underscored_names() -> None:
    for source in ("{% set ns = namespace(_x=1) %}", "{% set ns = namespace() %}{% set ns._x = 1 %}"):
        with pytest.raises(UnprocessableError, match="'_x'"):
            ChatTemplate.from_source(source, {}).render([])


def test_the_date_comes_from_the_clock_that_is_given() -> None:
    template = ChatTemplate.from_source("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime(2031, 2, 3))
    assert template.render([]) == "2031-02-03"
