"""From a client's body to sequences for the core. Synchronous: it runs in a worker thread.

Checks come in order of what they cost: the shape of the body, the model's name, what is not supported, the
template, the tokens, the context. Nothing reaches the core before all of them have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.api.errors import invalid, unsupported
from engine.api.replies import Head
from engine.api.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    TemplateFields,
    parse,
)
from engine.api.secret import salt
from engine.api.state import Ready
from engine.core.messages import GenerateRequest, Sampling
from engine.errors import ContextLengthError

#: OpenAI's default for /v1/completions; a chat may go on to the end of the context.
COMPLETION_MAX_TOKENS = 16
#: Characters of the longest token of any vocabulary (Llama 3 has one of 128 spaces), with room to spare.
LONGEST_TOKEN = 512
#: A text of more characters for each token of the context is counted in pieces before it is tokenised whole: the
#: tokenizer needs some 200 bytes for a token, gigabytes for a body of 32 MiB. Where a piece ends, tokens may differ, so
#: only what is many times too long is refused by that count.
USUAL_CHARS = 16
PIECE_CHARS = 1 << 16
TIMES_TOO_LONG = 8


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: `n` choices for each prompt (ids as int32 bytes, and its own max_tokens).

    `starts_text`: the reply is a text of its own, and does not go on with one that the client has.
    """

    head: Head
    prompts: tuple[tuple[bytes, int], ...]
    n: int
    sampling: Sampling
    stops: tuple[str, ...]
    starts_text: bool
    stream: bool
    include_usage: bool
    namespace: bytes = b""

    def requests(self) -> Iterator[GenerateRequest]:
        """In the order of the choices' indices. A seed gives each choice of a prompt its own."""
        for p, (ids, max_tokens) in enumerate(self.prompts):
            for i in range(self.n):
                seed = self.sampling.seed
                if seed is not None:
                    seed = (seed + i + 2**63) % 2**64 - 2**63
                yield GenerateRequest(f"{self.head.id}-{p * self.n + i}", ids,
                                      replace(self.sampling, max_tokens=max_tokens, seed=seed), self.namespace)


def prepare_chat(ready: Ready, body: bytes, tenant: bytes = b"") -> Job:
    """POST /v1/chat/completions of the tenant with this API key; raises RequestError and its kin."""
    request = parse(ChatRequest, body)
    name = ready.served(request.model)
    _refuse(request, _SAMPLING + _CHAT)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", request.top_logprobs, "needs logprobs to be true")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    ids = chat_ids(ready, request)
    wanted = request.max_completion_tokens or request.max_tokens
    if not ids:
        raise invalid("messages", request.messages, "the chat template made nothing of it")
    return _job(ready, name, request, (ids,), wanted, logprobs, tenant)


def prepare_completion(ready: Ready, body: bytes, tenant: bytes = b"") -> Job:
    """POST /v1/completions of the tenant with this API key; raises RequestError and its kin."""
    request = parse(CompletionRequest, body)
    name = ready.served(request.model)
    _refuse(request, _SAMPLING + _COMPLETION)
    prompts = _prompts(ready, request)
    wanted = request.max_tokens or COMPLETION_MAX_TOKENS
    return _job(ready, name, request, prompts, wanted, request.logprobs, tenant)


def chat_ids(ready: Ready, request: TemplateFields, *, add_special: bool = False) -> bytes:
    """The ids of rendered messages. The template writes special tokens itself, BOS too."""
    text = ready.text.template.render_chat(
        request.messages, tools=request.tools, add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=request.chat_template_kwargs)
    return encode(ready, text, "messages", add_special=add_special)


def encode(ready: Ready, text: str, param: str, *, add_special: bool) -> bytes:
    """The ids of `text`. A text that can't fit, whatever its tokens are, is refused before they are made."""
    least = len(text) // LONGEST_TOKEN
    if least > ready.info.max_context:
        raise ContextLengthError(
            f"This model's maximum context length is {ready.info.max_context} tokens, and the {param} hold "
            f"{len(text)} characters, which are at least {least} tokens.", param=param)
    if len(text) > USUAL_CHARS * ready.info.max_context:
        _refuse_by_pieces(ready, text, param)
    return ready.text.tokenizer.encode(text, add_special=add_special)


def _refuse_by_pieces(ready: Ready, text: str, param: str) -> None:
    count = 0
    for at in range(0, len(text), PIECE_CHARS):
        count += len(ready.text.tokenizer.encode(text[at:at + PIECE_CHARS])) // 4
        if count > TIMES_TOO_LONG * ready.info.max_context:
            raise ContextLengthError(
                f"This model's maximum context length is {ready.info.max_context} tokens, and the {param} hold "
                f"{len(text)} characters, of which the first {min(at + PIECE_CHARS, len(text))} alone are about "
                f"{count} tokens.", param=param)


def token_ids(ready: Ready, tokens: list[int], param: str) -> bytes:
    """Ids that a client gave, as int32 bytes; each must be one of the model's."""
    size = ready.info.vocab_size
    ids = np.asarray(tokens, dtype="<i8")
    bad = np.flatnonzero(ids >= size)
    if bad.size:
        at = int(bad[0])
        raise invalid(f"{param}[{at}]", tokens[at], f"no token of the model, whose ids end at {size - 1}")
    return ids.astype("<i4").tobytes()


def _prompts(ready: Ready, request: CompletionRequest) -> tuple[bytes, ...]:
    prompt, n = request.prompt, request.n or 1
    many: list[Any] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(many) * n > MAX_CHOICES:
        raise invalid("prompt", len(many), f"prompts × n must be at most {MAX_CHOICES}, and n is {n}")
    special = request.add_special_tokens is not False
    out = []
    for i, one in enumerate(many):
        param = "prompt" if one is prompt else f"prompt[{i}]"
        ids = encode(ready, one, param, add_special=special) if isinstance(one, str) else (
            token_ids(ready, one, param))
        if not ids:
            raise invalid(param, one, "is empty: there is nothing to continue")
        out.append(ids)
    return tuple(out)


def _job(ready: Ready, name: str, request: ChatRequest | CompletionRequest, prompts: tuple[bytes, ...],
         max_tokens: int | None, logprobs: int | None, tenant: bytes) -> Job:
    chat = isinstance(request, ChatRequest)
    fitted = tuple(
        (ids, _fit(ready, len(ids) // 4, max_tokens, "messages" if chat else "prompt")) for ids in prompts)
    head = Head(id=f"{'chatcmpl' if chat else 'cmpl'}-{ready.new_id()}", created=int(ready.now()), model=name,
                system_fingerprint=ready.fingerprint)
    stop, options = request.stop or [], request.stream_options
    return Job(
        head, fitted, request.n or 1, _sampling(ready, request, fitted, logprobs),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        starts_text=isinstance(request, ChatRequest) and not request.continue_final_message,
        stream=bool(request.stream), include_usage=bool(options and options.include_usage),
        namespace=b"" if request.cache_salt is None else salt(ready.secret, tenant, request.cache_salt))


def _fit(ready: Ready, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
    """The tokens to generate: what is wanted if it fits, or all that fit."""
    context = ready.info.max_context
    if prompt_tokens + (max_tokens or 1) <= context:
        return max_tokens or context - prompt_tokens
    wanted = "at least 1" if max_tokens is None else str(max_tokens)
    raise ContextLengthError(
        f"This model's maximum context length is {context} tokens. However, you requested "
        f"{prompt_tokens + (max_tokens or 1)} tokens ({prompt_tokens} in the {param}, {wanted} in the "
        "completion). Please reduce the length of either.", param=param)


def _sampling(ready: Ready, request: SamplingFields, prompts: tuple[tuple[bytes, int], ...],
              logprobs: int | None) -> Sampling:
    room = min(max_tokens for _, max_tokens in prompts)
    if (request.min_tokens or 0) > room:
        raise invalid("min_tokens", request.min_tokens, f"must be at most max_tokens, which is {room}")
    token_ids(ready, request.stop_token_ids or [], "stop_token_ids")
    # top_p 0 leaves only the likeliest token, which is what temperature 0 says.
    greedy = request.top_p == 0
    return Sampling(
        max_tokens=room,
        temperature=0.0 if greedy else 1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if greedy or request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0), min_p=request.min_p or 0.0, seed=request.seed,
        stop_token_ids=tuple(request.stop_token_ids or ()), min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos), logprobs=logprobs)


#: (field, whether a value is harmless, what is supported)
_Rule = tuple[str, Callable[[Any], bool], str]
_SAMPLING: tuple[_Rule, ...] = (
    ("presence_penalty", lambda v: v == 0, "only 0 is"),
    ("frequency_penalty", lambda v: v == 0, "only 0 is"),
    ("repetition_penalty", lambda v: v == 1, "only 1 is"),
    ("logit_bias", lambda v: not v, "leave it away"),
    ("response_format", lambda v: v.get("type", "text") == "text", 'only {"type": "text"} is, for now'),
)
_CHAT: tuple[_Rule, ...] = (
    ("tool_choice", lambda v: v in ("none", "auto"), "only none and auto are, for now"),
    ("functions", lambda v: not v, "use tools"),
    ("function_call", lambda v: v in ("none", "auto"), "use tools"),
)
_COMPLETION: tuple[_Rule, ...] = (
    ("echo", lambda v: not v, "only false is"),
    ("suffix", lambda v: not v, "leave it away"),
)


def _refuse(request: SamplingFields, rules: tuple[_Rule, ...]) -> None:
    for name, harmless, allowed in rules:
        value = getattr(request, name)
        if value is not None and not harmless(value):
            raise unsupported(name, value, allowed)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", request.best_of, "leave it away, or set it to n")
