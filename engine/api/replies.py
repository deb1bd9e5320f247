"""What clients get: OpenAI's shapes, with `usage.cache` beside them.

A field that was not set does not go out (`dump`): where OpenAI sends null, null is set, and where OpenAI
leaves a field away, it is left at its default.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from engine.core.messages import Usage as CoreUsage

Finish = Literal["stop", "length"]

#: OpenAI's floor: JSON has no infinity.
MIN_LOGPROB = -9999.0


class PromptDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens that were not computed: 0 or a number.")


class CacheUsage(BaseModel):
    """Where each prompt token came from: the sums of both add up to prompt_tokens."""

    cached: dict[str, int] = Field(description="Tokens by tier.")
    computed: dict[str, int] = Field(description="Tokens by the reason that they were computed.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    cache: CacheUsage


class UsageSum:
    """Adds the choices of one reply up: a prompt is counted once, at its first choice."""

    def __init__(self) -> None:
        self._prompt = self._completion = 0
        self._cached: dict[str, int] = {"hbm": 0}
        self._computed: dict[str, int] = {}

    def add(self, usage: CoreUsage, *, completion_tokens: int, first_of_prompt: bool) -> None:
        self._completion += completion_tokens
        if not first_of_prompt:
            return
        self._prompt += usage.prompt_tokens
        for total, part in ((self._cached, usage.cached), (self._computed, usage.computed)):
            for name, tokens in part.items():
                total[name] = total.get(name, 0) + tokens

    def reply(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt, completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self._cached.values())),
            cache=CacheUsage(cached=self._cached, computed=self._computed))


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class Head(BaseModel):
    """What every generated reply begins with. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChunkDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """`text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Head):
    """A whole completion, or a chunk of one: OpenAI gives both the same shape."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The served model's own name: an alias names the same model.")
    max_model_len: int = Field(description="Tokens of context, prompt and reply together.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "loading", "restarting"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def dump(reply: BaseModel) -> bytes:
    """JSON, without the fields that were left at their defaults."""
    return reply.model_dump_json(exclude_unset=True).encode()
