"""What the core counts: requests, tokens by where they came from, and speeds as they were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.messages import FinishReason
    from engine.core.request import Request
    from engine.core.scheduler import Work

#: Weight of the newest step in the running averages of speed.
NEWEST = 0.2


class Counters:
    """Monotonic, but for the two speeds. A prompt is counted once, when its request ends."""

    def __init__(self) -> None:
        self.finished = self.cancelled = self.failed = self.steps = 0
        self.prompt = self.generated = self.computed_in_steps = 0
        self.cached: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.prefill_tok_s = self.decode_step_ms = 0.0

    def step(self, work: list[Work], seconds: float) -> None:
        self.steps += 1
        n = sum(w.n for w in work)
        self.computed_in_steps += n
        decodes = sum(w.n == 1 for w in work)
        if decodes == len(work):
            self.decode_step_ms = self._average(self.decode_step_ms, seconds * 1000)
        elif n - decodes >= 64 and seconds > 0:
            self.prefill_tok_s = self._average(self.prefill_tok_s, n / seconds)

    def recompute_s(self, tokens: int) -> float:
        """Seconds to compute so many tokens at the measured speed; infinite while nothing was measured."""
        return tokens / self.prefill_tok_s if self.prefill_tok_s else math.inf

    def ended(self, request: Request, how: FinishReason | None) -> None:
        self.finished += how in ("stop", "length")
        self.cancelled += how == "cancelled"
        self.failed += how == "error"
        self.generated += request.usage.completion_tokens
        if request.counted:
            self.prompt += request.usage.prompt_tokens
            self.cached.update(request.usage.cached)
            self.reasons.update(request.usage.computed)

    def requests(self) -> dict[str, int]:
        return {"finished": self.finished, "cancelled": self.cancelled, "failed": self.failed}

    def tokens(self, tiers: Sequence[str]) -> dict[str, Any]:
        cached = {**dict.fromkeys(tiers, 0), **self.cached}
        return {"prompt": self.prompt, "cached": cached, "computed": dict(self.reasons), "generated": self.generated,
                "computed_in_steps": self.computed_in_steps}

    def speeds(self) -> dict[str, float]:
        return {"prefill_tok_s": round(self.prefill_tok_s, 1), "decode_step_ms": round(self.decode_step_ms, 2),
                "steps": self.steps}

    @staticmethod
    def _average(old: float, new: float) -> float:
        return new if old == 0 else old + NEWEST * (new - old)
