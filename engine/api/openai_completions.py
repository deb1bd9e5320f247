"""POST /v1/completions: a `Job` (prepare.py) to a reply, or to the chunks of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.api.prepare import Job
from engine.api.replies import MIN_LOGPROB, Completion, CompletionChoice, CompletionLogprobs, UsageSum
from engine.api.state import Ready
from engine.api.stream import TokenAt, add_usage, collect, pieces
from engine.text.tokenizer import Tokenizer


async def complete(ready: Ready, job: Job) -> Completion:
    """The whole reply. Choices of the first prompt come first."""
    whole = await collect(ready, job)
    choices = [
        CompletionChoice(index=i, text=text, finish_reason=finish,
                         logprobs=_logprobs(ready.text.tokenizer, tokens, job))
        for i, (text, tokens, finish) in enumerate(zip(whole.texts, whole.tokens, whole.finish, strict=True))]
    return Completion(
        **dict(job.head), object="text_completion", choices=choices, usage=whole.usage.reply())


async def stream(ready: Ready, job: Job) -> AsyncGenerator[Completion, None]:
    """The reply in chunks; the usage in one of its own, at the end, if it was asked for."""
    usage = UsageSum()
    async with aclosing(pieces(ready, job)) as source:
        async for piece in source:
            add_usage(usage, job, piece)
            choice = CompletionChoice(index=piece.choice, text=piece.text, finish_reason=piece.finish,
                                      logprobs=_logprobs(ready.text.tokenizer, piece.tokens or [], job))
            chunk = Completion(**dict(job.head), object="text_completion", choices=[choice])
            if job.include_usage:
                chunk.usage = None
            yield chunk
    if job.include_usage:
        yield Completion(**dict(job.head), object="text_completion", choices=[], usage=usage.reply())


def _logprobs(tokenizer: Tokenizer, tokens: list[TokenAt], job: Job) -> CompletionLogprobs | None:
    if job.sampling.logprobs is None:
        return None
    top = [{tokenizer.token_text(i): max(p, MIN_LOGPROB) for i, p in t.logprobs.top} for t in tokens]
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(t.logprobs.token) for t in tokens],
        token_logprobs=[max(t.logprobs.logprob, MIN_LOGPROB) for t in tokens],
        top_logprobs=top if job.sampling.logprobs else None,
        text_offset=[t.offset for t in tokens])
