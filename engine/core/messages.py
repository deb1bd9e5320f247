"""What crosses the socket between the API process and the core, and nothing else.

No torch here: both sides import it. Token ids are int32 little-endian `bytes` throughout.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgpack

from engine.model.sampling import Sampling, TokenLogprobs

__all__ = ["CoreInfo", "Delta", "GenerateRequest", "Sampling", "TokenLogprobs", "Usage"]

FinishReason = Literal["stop", "length", "cancelled", "error"]

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
    """Where the prompt's tokens came from: sum(cached) + sum(computed) == prompt_tokens, always.

    It is filled in at the first admission; a request that ends before that has zeros throughout. The keys of
    `computed` are the miss reasons: never_seen, evicted, load_failed, block_rounding, last_token.
    `cached` has a key for each tier that the core has.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: {"hbm": 0})
    computed: dict[str, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


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
    """What the core says of itself once it is ready. `notes` are for who started it."""

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
    tiers: list[str] = field(default_factory=lambda: ["hbm"])
    ram_bytes: int = 0
    ram_blocks: int = 0
    nvme_bytes: int = 0
    nvme_blocks: int = 0
    recovered_blocks: int = 0
    notes: list[str] = field(default_factory=list)


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
