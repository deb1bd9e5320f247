"""Choosing the next tokens of a step's rows.

A row's choice depends on its logits, its `Sampling`, its seed and its position, and on nothing else: neither
the rest of the batch nor what was drawn before. So a request repeats itself in any company, and a preempted one
goes on as it would have. Randomness is one uniform number a token, a hash of (seed, position): no generator has
a state.

Order of filters (Transformers'): temperature, top_k, top_p over what top_k left, min_p.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.sampling import Sampling, TokenLogprobs

#: How many of the likeliest tokens are sorted before the whole vocabulary is: a top_p of 0.95 seldom needs
#: more, and sorting 49,152 costs ten times as much.
_FIRST_SORTED = 256


class SampleRow(NamedTuple):
    """One row's wishes. `position` is the index of the generated token; `suppress` ids can't be chosen."""

    sampling: Sampling
    seed: int
    position: int
    suppress: tuple[int, ...] = ()


@dataclass(slots=True)
class SampleResult:
    """A token a row; log-probabilities (of the raw distribution: no temperature, no filters) where wanted."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@torch.inference_mode()
def sample(logits: Tensor, rows: list[SampleRow]) -> SampleResult:
    """logits float32 [m, vocab], one row each of `rows`; suppressed ids are overwritten in it."""
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits, {len(rows)} rows to sample"
    raw = {i: torch.log_softmax(logits[i], -1)
           for i, row in enumerate(rows) if row.sampling.logprobs is not None}
    for i, row in enumerate(rows):
        if row.suppress:
            # Stop ids come from clients: those that the vocabulary lacks can't be sampled anyway.
            logits[i, [token for token in row.suppress if 0 <= token < logits.shape[1]]] = -torch.inf
    tokens: list[int] = logits.argmax(-1).tolist()
    for i, row in enumerate(rows):
        if not is_greedy(row.sampling):
            tokens[i] = _draw(logits[i], row.sampling, uniform(row.seed, row.position), tokens[i])
    logprobs = [_token_logprobs(raw[i], tokens[i], row.sampling.logprobs or 0) if i in raw else None
                for i, row in enumerate(rows)]
    return SampleResult(tokens, logprobs)


def is_greedy(sampling: Sampling) -> bool:
    """Whether the likeliest token is always the one."""
    return sampling.temperature <= 0 or sampling.top_k == 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on both and repeats: 53 bits of BLAKE2b. Any integers will do."""
    mask = (1 << 64) - 1
    digest = hashlib.blake2b(struct.pack("<QQ", seed & mask, position & mask), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _draw(logits: Tensor, sampling: Sampling, u: float, likeliest: int) -> int:
    scaled = (logits - logits[likeliest]).div_(sampling.temperature)
    if not (0 < sampling.top_k < len(scaled) or sampling.top_p < 1 or sampling.min_p > 0):
        chosen = _invert(scaled.softmax(-1), u)
        return likeliest if chosen is None else chosen
    probabilities, ids = kept(scaled, sampling)
    chosen = _invert(probabilities, u)
    return likeliest if chosen is None else int(ids[chosen])


def kept(scaled: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What the filters leave of logits [vocab] (temperature applied): probabilities, falling, and their ids.

    Probabilities are not summed to 1 again. At least the likeliest token is always there.
    """
    if 0 < sampling.top_k < len(scaled):
        best, ids = torch.topk(scaled, sampling.top_k)
        probabilities = best.softmax(-1)
        count = _nucleus(probabilities, sampling.top_p)
    else:
        probabilities, ids, count = _sorted_nucleus(scaled.softmax(-1), sampling)
    if sampling.min_p > 0:
        count = min(count, max(1, int((probabilities >= sampling.min_p * probabilities[0]).sum())))
    return probabilities[:count], ids[:count]


def _sorted_nucleus(probabilities: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, int]:
    """The likeliest tokens, sorted no further than top_p or min_p reaches."""
    size = min(_FIRST_SORTED, len(probabilities))
    best, ids = torch.topk(probabilities, size)
    enough = float(best.double().sum()) >= sampling.top_p or float(best[-1]) < sampling.min_p * float(best[0])
    if not enough:
        best, ids = torch.sort(probabilities, descending=True, stable=True)
    return best, ids, _nucleus(best, sampling.top_p)


def _nucleus(probabilities: Tensor, top_p: float) -> int:
    """How many of the likeliest it takes to reach top_p; the one that reaches it counts."""
    if top_p >= 1:
        return len(probabilities)
    before = probabilities.double().cumsum(-1) - probabilities
    return max(1, int((before < top_p).sum()))


def _invert(probabilities: Tensor, u: float) -> int | None:
    """The index at which the running sum passes u of the whole; None where there is no whole (NaN)."""
    running = probabilities.double().cumsum(-1)
    total = float(running[-1])
    if not total > 0:
        return None
    index = int(torch.searchsorted(running, u * total, right=True))
    if index < len(running):
        return index
    return int(probabilities.nonzero()[-1])


def _token_logprobs(logprobs: Tensor, token: int, count: int) -> TokenLogprobs:
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = torch.topk(logprobs, min(count, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
