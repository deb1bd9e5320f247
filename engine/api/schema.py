"""What clients send: one pydantic model for each body.

Unknown fields are ignored, as OpenAI does, and null means "not given". A field that OpenAI or vLLM knows and
that we can't honour is in here to be refused by name (`prepare.py`), never ignored.

Messages are dicts with the keys that the client gave and no others: a template may ask whether a key is
there.
"""

from __future__ import annotations

from typing import Annotated, Any, Required, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from engine.api.errors import from_validation
from engine.errors import RequestError

#: The most choices for one prompt, and for one request with many prompts: each is a sequence in the core.
MAX_N = 16
MAX_CHOICES = 128
MAX_STOPS = 16
#: OpenAI's bound; each alternative costs the core a place in a sort of the vocabulary.
MAX_TOP_LOGPROBS = 20
MAX_SALT = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Request(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = Field(None, description="A served name or alias; the served model where absent.")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


def _text_or_list(value: Any) -> str:
    return "list" if isinstance(value, list) else "text"


Stop = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), Tag("list")],
    Discriminator(_text_or_list)]


class SamplingFields(Request):
    """What chat and completions have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: Finite | None = Field(None, ge=0, description="0 is greedy. Default 1.")
    top_p: Finite | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off.")
    min_p: Finite | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Finite | None = Field(None, description="Only 0 is supported.")
    frequency_penalty: Finite | None = Field(None, description="Only 0 is supported.")
    repetition_penalty: Finite | None = Field(None, description="Only 1 is supported.")
    logit_bias: dict[str, Finite] | None = Field(None, description="Not supported unless empty.")
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"} is supported.')
    best_of: int | None = Field(None, description="Not supported unless equal to n.")
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT, description=(
        "Shares cached tokens with requests that name the same salt (under the same API key) and no others."))


def _kind_of_content(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


class ContentPart(TypedDict, total=False):
    """A part of a message; only text parts are served."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: Required[str]


class ChatMessage(TypedDict, total=False):
    """One message. Other keys (name, tool_calls, reasoning_content, …) reach the template as they are."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: Required[str]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[ContentPart | str], Tag("parts")],
        Discriminator(_kind_of_content)] | None


class TemplateFields(Request):
    """What is rendered into a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Default: true, unless continue_final_message.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(TemplateFields, SamplingFields):
    """POST /v1/chat/completions"""

    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: str | dict[str, Any] | None = Field(None, description="none or auto.")
    functions: list[dict[str, Any]] | None = Field(None, description="Not supported: use tools.")
    function_call: str | dict[str, Any] | None = Field(None, description="Not supported: use tools.")


def _kind_of_prompt(value: Any) -> str:
    """By the first element: pydantic would try every shape, and report an error for each."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "ids" if isinstance(first, int) else "id_lists" if isinstance(first, list) else "texts"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1), Tag("texts")]
    | Annotated[list[TokenId], Tag("ids")]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Tag("id_lists")],
    Discriminator(_kind_of_prompt)]


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: Prompt
    add_special_tokens: bool | None = Field(None, description="Default true: a text prompt gets the BOS.")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = Field(None, description="Not supported.")
    suffix: str | None = Field(None, description="Not supported.")


class TokenizePrompt(Request):
    """POST /tokenize, of a text."""

    prompt: str
    add_special_tokens: bool | None = Field(None, description="Default true.")


class TokenizeChat(TemplateFields):
    """POST /tokenize, of messages."""

    add_special_tokens: bool | None = Field(None, description="Default false: the template writes them.")


class DetokenizeRequest(Request):
    """POST /detokenize"""

    tokens: list[TokenId]


R = TypeVar("R", bound=BaseModel)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; RequestError with the position where it breaks."""
    try:
        value = from_json(body)
    except ValueError as e:
        raise RequestError(f"the body is not JSON: {e}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


def parse(model: type[R], body: bytes) -> R:
    """`body` as `model`; RequestError naming the field, its value and what is allowed."""
    return _validate(model, parse_json(body))


def parse_tokenize(body: bytes) -> TokenizePrompt | TokenizeChat:
    """Either form of /tokenize, by whether `messages` is there."""
    value = parse_json(body)
    return _validate(TokenizeChat, value) if "messages" in value else _validate(TokenizePrompt, value)


def _validate(model: type[R], value: dict[str, Any]) -> R:
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise from_validation(e, value) from None
