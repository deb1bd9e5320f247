"""Where a template is looked for, and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text_helpers import small_folder

from engine.errors import ConfigError, ModelError, UnprocessableError
from engine.model.library import ModelFiles
from engine.text.template import ChatTemplate, load_template
from engine.text.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def load(files: ModelFiles, override: Path | None = None) -> ChatTemplate:
    return load_template(files, override, load_tokenizer(files))


def folder_with(tmp_path: Path, config: dict[str, Any], **files: str) -> ModelFiles:
    small = small_folder(tmp_path / "model", config)
    for name, text in files.items():
        path = small.path / name.replace("__", "/").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return small


def test_tokenizer_config_s_template_with_its_special_tokens(tmp_path: Path) -> None:
    files = folder_with(tmp_path, {"chat_template": "{{ bos_token }}config", "bos_token": "<s>"})
    assert load(files).render_chat(CHAT) == "<s>config"


def test_the_jinja_file_is_before_tokenizer_config(tmp_path: Path) -> None:
    files = folder_with(tmp_path, {"chat_template": "config"}, chat_template_jinja="file")
    assert load(files).render_chat(CHAT) == "file"


@pytest.mark.parametrize("in_files", [True, False])
def test_the_template_for_tools_is_taken_when_there_are_tools(tmp_path: Path, in_files: bool) -> None:
    with_tools = "tools: {{ tools | map(attribute='function') | map(attribute='name') | join }}"
    if in_files:
        files = folder_with(
            tmp_path, {}, chat_template_jinja="plain", additional_chat_templates__tool_use_jinja=with_tools)
    else:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": with_tools}]
        files = folder_with(tmp_path, {"chat_template": named})
    template = load(files)
    assert template.capabilities.tools
    assert template.render_chat(CHAT) == template.render_chat(CHAT, tools=[]) == "plain"
    assert template.render_chat(CHAT, tools=[TOOL]) == "tools: f"


def test_the_override_is_before_all(tmp_path: Path) -> None:
    files = folder_with(tmp_path, {"chat_template": "config"})
    path = tmp_path / "own.jinja"
    path.write_text("own {{ messages[0].content }}")
    assert load(files, path).render_chat(CHAT) == "own Hi"


def test_an_override_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    files = folder_with(tmp_path, {})
    with pytest.raises(ConfigError, match=r"missing\.jinja can't be read: .*No such file"):
        load(files, tmp_path / "missing.jinja")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"broken\.jinja is broken in line 1"):
        load(files, tmp_path / "broken.jinja")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        load(files, tmp_path / "binary.jinja")


def test_a_model_s_broken_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat template of small is broken in line 1.*--chat-template"):
        load(folder_with(tmp_path, {"chat_template": "{% if %}"}))


def test_without_one_chatml_is_used_if_the_tokenizer_has_its_marks(tmp_path: Path) -> None:
    added = {"5": {"content": "<|im_start|>", "special": True}, "6": {"content": "<|im_end|>", "special": True}}
    files = folder_with(tmp_path, {"added_tokens_decoder": added})
    assert load(files).render_chat(CHAT) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_without_one_and_without_marks_chats_are_refused_and_the_way_out_is_told(tmp_path: Path) -> None:
    template = load(folder_with(tmp_path, {}))
    with pytest.raises(UnprocessableError, match=r"small has no chat template\. Use /v1/completions") as error:
        template.render_chat(CHAT)
    assert error.value.code == "no_chat_template"


def test_smollm2_s_template_is_in_its_gguf(smollm2_template: ChatTemplate) -> None:
    assert "SmolLM, trained by Hugging Face" in smollm2_template.source
    assert not smollm2_template.knows_tools


def test_broken_json_is_named(tmp_path: Path) -> None:
    files = folder_with(tmp_path, {})
    tokenizer = load_tokenizer(files)
    (files.path / "tokenizer_config.json").write_text(json.dumps({})[:1])
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is no JSON"):
        load_template(files, None, tokenizer)


@pytest.mark.parametrize(("name", "data"), [
    ("tokenizer_config.json", b'{"chat_template": [{"x": 1}]}'), ("tokenizer_config.json", b'{"chat_template": [5]}'),
    ("tokenizer_config.json", b"[" * 100_000), ("chat_template.jinja", b"\xff\xfe"),
])
def test_a_hostile_template_file_is_a_model_error(tmp_path: Path, name: str, data: bytes) -> None:
    files = folder_with(tmp_path, {})
    tokenizer = load_tokenizer(files)
    (files.path / name).write_bytes(data)
    with pytest.raises(ModelError, match=r"can't be read|is no JSON"):
        load_template(files, None, tokenizer)


@pytest.mark.parametrize("added", [b"[]", b'{"x": {}}', b'{"5": {"content": 5}}'])
def test_hostile_added_tokens_are_a_model_error(tmp_path: Path, added: bytes) -> None:
    files = folder_with(tmp_path, {})
    (files.path / "tokenizer_config.json").write_bytes(b'{"added_tokens_decoder": ' + added + b"}")
    if added != b"[]":      # an empty list is as good as none
        with pytest.raises(ModelError, match="no tokenizer can be made"):
            load_tokenizer(files)
