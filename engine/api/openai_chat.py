"""POST /v1/chat/completions: a `Job` (prepare.py) to a reply, or to the chunks of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.api.prepare import Job
from engine.api.replies import (
    MIN_LOGPROB,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    ChunkDelta,
    Finish,
    TokenLogprob,
    TopLogprob,
    UsageSum,
)
from engine.api.state import Ready
from engine.api.stream import TokenAt, add_usage, collect, pieces
from engine.text.tokenizer import Tokenizer


async def complete(ready: Ready, job: Job) -> ChatCompletion:
    """The whole reply."""
    whole = await collect(ready, job)
    wanted = job.sampling.logprobs is not None
    choices = [
        ChatChoice(index=i, message=AssistantMessage(role="assistant", content=text), finish_reason=finish,
                   logprobs=_logprobs(ready.text.tokenizer, tokens) if wanted else None)
        for i, (text, tokens, finish) in enumerate(zip(whole.texts, whole.tokens, whole.finish, strict=True))]
    return ChatCompletion(
        **dict(job.head), object="chat.completion", choices=choices, usage=whole.usage.reply())


async def stream(ready: Ready, job: Job) -> AsyncGenerator[ChatChunk, None]:
    """The reply in chunks: role first, the finish reason last, then the usage if it was asked for."""
    usage = UsageSum()
    begun: set[int] = set()
    async with aclosing(pieces(ready, job)) as source:
        async for piece in source:
            if piece.choice not in begun:
                begun.add(piece.choice)
                yield _chunk(job, piece.choice, ChunkDelta(role="assistant", content=""))
            if piece.text or piece.tokens:
                logprobs = None if piece.tokens is None else _logprobs(ready.text.tokenizer, piece.tokens)
                yield _chunk(job, piece.choice, ChunkDelta(content=piece.text), logprobs=logprobs)
            if piece.finish is not None:
                add_usage(usage, job, piece)
                yield _chunk(job, piece.choice, ChunkDelta(), finish=piece.finish)
    if job.include_usage:
        yield ChatChunk(**dict(job.head), object="chat.completion.chunk", choices=[], usage=usage.reply())


def _chunk(job: Job, index: int, delta: ChunkDelta, *, logprobs: ChatLogprobs | None = None,
           finish: Finish | None = None) -> ChatChunk:
    choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
    chunk = ChatChunk(**dict(job.head), object="chat.completion.chunk", choices=[choice])
    if job.include_usage:
        chunk.usage = None        # OpenAI: null in every chunk but the one that has it
    return chunk


def _logprobs(tokenizer: Tokenizer, tokens: list[TokenAt]) -> ChatLogprobs:
    return ChatLogprobs(content=[
        TokenLogprob(**dict(_top(tokenizer, t.logprobs.token, t.logprobs.logprob)),
                     top_logprobs=[_top(tokenizer, *pair) for pair in t.logprobs.top])
        for t in tokens])


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    return TopLogprob(token=tokenizer.token_text(token), logprob=max(logprob, MIN_LOGPROB),
                      bytes=list(tokenizer.token_bytes(token)))
