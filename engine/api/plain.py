"""The endpoints that answer at once: models, tokens, health, the cache's figures."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.api.prepare import chat_ids, encode, token_ids
from engine.api.replies import DetokenizeReply, Health, ModelCard, ModelList, TokenizeReply
from engine.api.schema import DetokenizeRequest, TokenizeChat, parse, parse_tokenize
from engine.api.state import Ready, ServerState


def models(ready: Ready, started: int) -> ModelList:
    """The served name and its aliases."""
    return ModelList(object="list", data=[_card(ready, name, started) for name in ready.names])


def model(ready: Ready, name: str, started: int) -> ModelCard:
    """One name; raises UnknownModelError."""
    ready.served(name)
    return _card(ready, name, started)


def tokenize(ready: Ready, body: bytes) -> TokenizeReply:
    """vLLM's form: a text, or messages as a chat would render them."""
    request = parse_tokenize(body)
    ready.served(request.model)
    if isinstance(request, TokenizeChat):
        ids = chat_ids(ready, request, add_special=bool(request.add_special_tokens))
    else:
        ids = encode(ready, request.prompt, "prompt", add_special=request.add_special_tokens is not False)
    tokens = np.frombuffer(ids, dtype="<i4").tolist()
    return TokenizeReply(count=len(tokens), max_model_len=ready.info.max_context, tokens=tokens)


def detokenize(ready: Ready, body: bytes) -> DetokenizeReply:
    """The text of ids, special tokens written out."""
    request = parse(DetokenizeRequest, body)
    ready.served(request.model)
    ids = token_ids(ready, request.tokens, "tokens")
    return DetokenizeReply(prompt=ready.text.tokenizer.decode(ids, skip_special=False))


def health(state: ServerState) -> tuple[int, Health]:
    """HTTP status and body."""
    core = state.core_state()
    if core == "ready":
        return 200, Health(status="ok")
    return 503, Health(status="loading" if core == "loading" else "restarting")


async def cache_stats(state: ServerState) -> dict[str, Any]:
    """The core's own figures."""
    return await state.ready().core.stats()


def _card(ready: Ready, name: str, started: int) -> ModelCard:
    return ModelCard(id=name, object="model", created=started, owned_by="trunkline", root=ready.names[0],
                     max_model_len=ready.info.max_context)
