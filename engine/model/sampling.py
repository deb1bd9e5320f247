"""What a request wishes of the sampler, and what the sampler tells of a token. No torch.

`engine.core.messages` carries both across the socket; they live here because `core` may import `model`, and
not the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Sampling:
    """How to choose each next token.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 switch themselves off. `seed` makes a request
    repeatable whatever else is in the batch. `logprobs` is the number of alternatives wanted (0: only the
    sampled token's own), None for none. Stop strings are the API process's work (it has the text).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: the sampled token, then the `logprobs` most likely."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
