"""What crosses the socket between the API process and the core, and nothing else.

No torch here: both sides import it. Token ids are int32 little-endian `bytes` throughout.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgpack

FinishReason = Literal["stop", "length", "cancelled", "error"]

#: Why a prompt token was computed and not found (docs/architecture.md, "Words").
MISS_REASONS = ("never_seen", "evicted", "block_rounding", "last_token")


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
class GenerateRequest:
    """One sequence to continue. `namespace` is the tenant's salt digest (b"" for none)."""

    id: str
    ids: bytes
    sampling: Sampling
    namespace: bytes = b""
    session: str | None = None


@dataclass(slots=True)
class Usage:
    """Where the prompt's tokens came from: sum(cached) + sum(computed) == prompt_tokens, always."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: {"hbm": 0})
    computed: dict[str, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: the sampled token, then the `logprobs` most likely."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """What one step did for one request. `ids` may be empty; `finish` is set once, in the last delta, and
    then `usage` is set as well. A stop token (EOS or stop_token_ids) is not among `ids`.

    `prefilled`/`prefill_total` count prompt tokens during prefill (progress), else 0.
    """

    id: str
    ids: bytes = b""
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    stop_token: int | None = None
    prefilled: int = 0
    prefill_total: int = 0


@dataclass(slots=True, frozen=True)
class CoreInfo:
    """What the core says of itself once it is ready."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_context: int
    block_size: int
    pool_blocks: int
    pool_bytes: int
    load_s: float


def pack_request(request: GenerateRequest) -> dict[str, Any]:
    return {"op": "generate", **asdict(request)}


def unpack_request(raw: dict[str, Any]) -> GenerateRequest:
    s = dict(raw["sampling"])
    s["stop_token_ids"] = tuple(s["stop_token_ids"])
    return GenerateRequest(raw["id"], raw["ids"], Sampling(**s), raw["namespace"], raw["session"])


def pack_delta(d: Delta) -> list[Any]:
    logprobs = None if d.logprobs is None else [(t.token, t.logprob, t.top) for t in d.logprobs]
    usage = None if d.usage is None else asdict(d.usage)
    return [d.id, d.ids, logprobs, d.finish, usage, d.error, d.stop_token, d.prefilled, d.prefill_total]


def unpack_delta(raw: list[Any]) -> Delta:
    did, ids, logprobs, finish, usage, error, stop_token, prefilled, total = raw
    return Delta(
        did, ids,
        None if logprobs is None else [
            TokenLogprobs(t, lp, tuple((a, b) for a, b in top)) for t, lp, top in logprobs],
        finish, None if usage is None else Usage(**usage), error, stop_token, prefilled, total)


def pack(message: Any) -> bytes:
    return bytes(msgpack.packb(message, use_bin_type=True))


def unpack(frame: bytes) -> Any:
    return msgpack.unpackb(frame, raw=False, strict_map_key=False)
