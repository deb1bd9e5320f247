"""A request inside the core: what it asked for, where it stands, what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from engine.core.messages import Sampling, Usage

if TYPE_CHECKING:
    from engine.core.account import Found
    from engine.core.flights import Flight
    from engine.core.restores import Restore
    from radix import Lease, Path

BYTES_PER_ID = 4


class State(Enum):
    """waiting → (restoring) → running (prefill, then decode) → finished; a waiter in a flight is still waiting."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    RESTORING = "restoring"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence.

    `prompt` is int32 LE, as it came; `tokens` is it and what was sampled so far. `computed` tokens have their
    KV in the pool.
    `table` is the block table: the first `path.n_blocks` slots are the tree's, the others are ours alone.
    KV length = computed, and at most one token (the last sampled) has none: computed <= n_tokens.
    While it is restoring, `restore` fills the slots from `computed` to `restored_to` tokens. `looked_ahead` are blocks
    that were moved from NVMe to RAM for it.
    """

    id: str
    namespace: Any
    prompt: bytes
    tokens: bytearray
    prompt_tokens: int
    sampling: Sampling
    seed: int
    arrived: float
    stop_ids: frozenset[int]
    state: State = State.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    path: Path | None = None
    lease: Lease | None = None
    flight: Flight | None = None
    restore: Restore | None = None
    restored_to: int = 0
    found: Found | None = None
    looked_ahead: set[int] = field(default_factory=set)
    usage: Usage = field(default_factory=Usage)
    counted: bool = False
    preempted: int = 0
    known: int = 0
    known_at: int = -1

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // BYTES_PER_ID

    @property
    def remaining(self) -> int:
        """Tokens to compute; 1 in decode."""
        return self.n_tokens - (self.restored_to or self.computed)

    @property
    def generated(self) -> int:
        return self.n_tokens - self.prompt_tokens

    def slice(self, start: int, end: int) -> bytes:
        return bytes(self.tokens[start * BYTES_PER_ID:end * BYTES_PER_ID])
