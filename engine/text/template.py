"""A model's chat template: messages to the text that the model was trained on. No torch.

Knows the conventions of Hugging Face's `apply_chat_template` (Transformers 5.24 was read), and where a
template is kept. The environment that it runs in, and what bounds it, is sandbox.py; what it can render is
found by capabilities.py; what it can't is made text by fold.py. Does not know tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from engine.errors import ConfigError, ModelError, RequestError, UnprocessableError
from engine.model.gguf import GgufFile
from engine.model.library import ModelFiles
from engine.text.capabilities import OVER_BUDGET, probe
from engine.text.fold import fold_tools
from engine.text.messages import normalise_messages, normalise_tools
from engine.text.sandbox import MAX_CHARS, Budget, OverBudgetError, Sandbox
from engine.text.tokenizer import Tokenizer, read_json

#: Rendering 200,000 tokens of transcript takes some 10 ms.
DEADLINE_S = 2.0
#: For models without a template whose tokenizer has ChatML's marks.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: What a template is given by name; chat_template_kwargs can't replace them.
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "deadline_s", "self")
#: Names under which clients send a reasoning model's thoughts; the first is what templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: Put behind the message that is to be continued, and cut off again with all that follows.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One template, or two: some models have a second one for conversations with tools.

    `refusal` is what a client is told where a model has none at all.

    Thread-safe. Rendering is bounded (deadline_s, MAX_CHARS) and holds the GIL only between Python's
    switches, but it is work: an API calls it in a worker thread when messages are long, so that its loop
    goes on.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *,
        name: str = "chat template", clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now, refusal: str | None = None,
    ) -> None:
        self.name = name
        self._refusal = refusal
        self.source = sources["default"] if "default" in sources else next(iter(sources.values()))
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self._sandbox = Sandbox(now)
        self._default = self._compiled(self.source)
        self._with_tools = self._compiled(sources["tool_use"]) if "tool_use" in sources else self._default
        self.capabilities = probe(lambda messages, tools: self.render(messages, tools=tools))

    @classmethod
    def from_source(
        cls, source: str | Mapping[str, str], special_tokens: Mapping[str, str], **options: Any
    ) -> ChatTemplate:
        """From jinja source, or from several by name ("default", "tool_use"). ModelError says where it is
        broken.
        """
        return cls({"default": source} if isinstance(source, str) else source, special_tokens, **options)

    @property
    def knows_tools(self) -> bool:
        """Whether tool definitions, calls and results all go through the template; else they become text."""
        return self.capabilities.tools and self.capabilities.tool_messages

    def render_chat(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool | None = None,
        continue_final_message: bool = False, template_kwargs: Mapping[str, Any] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> str:
        """A request's messages and tools, as the client sent them, to the prompt's text.

        Raises RequestError for a malformed message, and as `render` does.
        """
        kwargs = dict(template_kwargs or {})
        if reserved := [name for name in RESERVED if name in kwargs]:
            raise RequestError(
                f"chat_template_kwargs can't set {reserved[0]!r}: it is a field of the request itself.",
                param="chat_template_kwargs")
        chat, native = fold_tools(normalise_messages(messages), normalise_tools(tools), self.capabilities)
        return self.render(
            chat, tools=native or None, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, deadline_s=deadline_s, **kwargs)

    def render(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None, continue_final_message: bool = False,
        deadline_s: float = DEADLINE_S, **kwargs: Any,
    ) -> str:
        """The text of `messages`, as `apply_chat_template(tokenize=False)` gives it.

        `add_generation_prompt` (the default, unless continuing) ends with the header of a reply;
        `continue_final_message` leaves the last message open instead, for the model to go on with.

        Raises UnprocessableError when the template raises, runs longer than `deadline_s` seconds or writes
        more than MAX_CHARS characters.
        """
        if self._refusal is not None:
            raise UnprocessableError(self._refusal, code="no_chat_template")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true: the last message is either "
                "continued, or followed by a new one.", param="continue_final_message")
        chat = [_aliased({k: v for k, v in m.items() if v is not None}) for m in messages]
        last = self._mark_last(chat) if continue_final_message else None
        context = {
            **self._special_tokens, "documents": None, **kwargs, "messages": chat, "tools": tools,
            "add_generation_prompt": not continue_final_message if add_generation_prompt is None
            else add_generation_prompt,
        }
        template = self._default if tools is None else self._with_tools
        text = self._run(template, context, deadline_s)
        return text if last is None else _cut_at_mark(text, last)

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            return self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"The {self.name} is broken in line {error.lineno}: {error.message}. "
                "Mend it, or give another with --chat-template FILE.") from None
        except RecursionError:
            raise ModelError(f"The {self.name} is nested too deeply to be compiled.") from None

    def _run(self, template: jinja2.Template, context: dict[str, Any], deadline_s: float) -> str:
        budget = Budget(self._clock() + deadline_s, deadline_s, self._clock)
        try:
            with self._sandbox.bounded(budget):
                return self._sandbox.concat(self._pieces(template, context))
        except OverBudgetError as error:
            raise UnprocessableError(
                f"The {self.name} {error}. If the messages are not to blame, the server's operator can give "
                "another with --chat-template FILE.", code=OVER_BUDGET) from None
        except Exception as error:  # whatever a template does is its own error, and a client's answer
            raise UnprocessableError(self._explained(error), code="template_error") from None

    def _pieces(self, template: jinja2.Template, context: dict[str, Any]) -> Iterable[str]:
        written = 0
        for piece in template.generate(context):
            self._sandbox.spend()
            if (written := written + len(piece)) > MAX_CHARS:
                raise OverBudgetError(f"wrote more than {MAX_CHARS:,} characters")
            yield piece

    def _explained(self, error: Exception) -> str:
        if type(error) is jinja2.TemplateError:  # raise_exception(...) in the template
            return f"The {self.name} refuses these messages: {error}"
        if isinstance(error, RecursionError):
            return f"The {self.name} calls itself without end."
        place = f" in line {line}" if (line := _line(error)) is not None else ""
        return f"The {self.name} failed{place}: {error or type(error).__name__} ({type(error).__name__})"

    def _mark_last(self, chat: list[dict[str, Any]]) -> str:
        """Put the mark behind the last message's content, which is returned."""
        content = chat[-1].get("content") if chat else None
        if not isinstance(content, str):
            raise RequestError(
                "continue_final_message is true, but the last message has no text to continue.",
                param="messages")
        chat[-1]["content"] = content + _TAG
        return content


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """A thought under the names that templates read: reasoning_content, and thinking for gpt-oss."""
    thought = next((message[key] for key in _REASONING if key in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _cut_at_mark(text: str, last: str) -> str:
    mark = _TAG.strip()
    if mark not in text or last.strip() not in text:
        raise UnprocessableError(
            "continue_final_message is true, but the chat template does not render the last message as is, "
            "so there is nothing to continue.", code="template_error")
    at = text.rindex(mark)
    if text.startswith(_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the mark has lost its space: this template strips messages


def _line(error: Exception) -> int | None:
    """The template's line that raised, from the traceback that jinja2 rewrote."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def load_template(
    files: ModelFiles, override: Path | None, tokenizer: Tokenizer, **options: Any
) -> ChatTemplate:
    """The template that a model is served with: `override`, else the model's own, else ChatML if its
    tokenizer has the marks, else one that refuses every chat and says why (completions go on working).

    Raises ConfigError for an override that can't be read or compiled, ModelError for a broken one of the
    model's.
    """
    special = tokenizer.special_tokens
    if override is not None:
        return _overriding(override, special, options)
    sources = _sources(files)
    if sources:
        return ChatTemplate(sources, special, name=f"chat template of {files.name}", **options)
    if tokenizer.token_id("<|im_start|>") is not None and tokenizer.token_id("<|im_end|>") is not None:
        return ChatTemplate({"default": CHATML}, special, name="built-in ChatML template", **options)
    missing = (
        f"{files.name} has no chat template. Use /v1/completions, or start the server with "
        "--chat-template FILE.")
    return ChatTemplate({"default": ""}, special, refusal=missing, **options)


def _overriding(path: Path, special: Mapping[str, str], options: Mapping[str, Any]) -> ChatTemplate:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} can't be read: {error}.") from None
    try:
        return ChatTemplate({"default": source}, special, name=f"chat template {path}", **options)
    except ModelError as error:
        raise ConfigError(error.message) from None


def _sources(files: ModelFiles) -> dict[str, str]:
    try:
        return _gguf_sources(files.path) if files.kind == "gguf" else _folder_sources(files.path)
    except (LookupError, TypeError, ValueError, OSError) as error:  # ValueError: bytes that are no UTF-8
        raise ModelError(f"{files.path}: its chat template can't be read ({type(error).__name__}: {error}). Download "
                         "it again, or give another with --chat-template FILE.") from None


def _folder_sources(folder: Path) -> dict[str, str]:
    """chat_template.jinja (and additional_chat_templates/NAME.jinja), else what tokenizer_config.json
    holds.
    """
    if (path := folder / "chat_template.jinja").is_file():
        named = {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {name: p.read_text(encoding="utf-8") for name, p in {**named, "default": path}.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, str):
            return {"default": found}
        if isinstance(found, list):
            return {str(entry["name"]): str(entry["template"]) for entry in found}
    return {}


def _gguf_sources(path: Path) -> dict[str, str]:
    metadata, key = GgufFile(path).metadata, "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in metadata.get("tokenizer.chat_templates", ())}
    sources = {name: source for name, source in named.items() if isinstance(source, str)}
    if isinstance(metadata.get(key), str):
        sources = {"default": metadata[key], **sources}
    return sources
