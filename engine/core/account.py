"""The account of a prompt: where each of its tokens came from. It is made once, at the first admission; with a restore,
when that is over, from what was really moved.

    cached: hbm, ram, nvme      the lowest tier that the token was moved up from for this request
    computed: evicted           was known, and is in no tier, or behind what is in none
              load_failed       lay below, and could not be read
              block_rounding    agrees with a part of a block only
              last_token        each prompt's last
              never_seen        the rest
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from engine.core.request import Request

if TYPE_CHECKING:
    from radix import Path


class Found(NamedTuple):
    """What admission found, in tokens: `hbm` in HBM (a partial block too), `reach` there and below it without a hole,
    and of the rest `evicted` and `rounded`."""

    hbm: int
    reach: int
    evicted: int
    rounded: int

    @classmethod
    def of(cls, path: Path, reach: int, request: Request) -> Found:
        """`reach` tokens lie in HBM or below; the request was admitted onto `request.computed` of them."""
        partial = path.partial.n_tokens if path.partial is not None else 0
        hbm = request.computed
        below = reach > path.n_tokens
        used = 0 if below else partial
        evicted = max(0, path.known_tokens - reach - used)
        # What a partial block would have given, had there been room to copy it, is rounding too.
        unused = 0 if below else path.reusable_tokens - hbm
        return cls(hbm, max(reach, hbm), evicted, path.rounded_tokens + unused)


def count(request: Request, found: Found, restored: Mapping[str, int] | None = None) -> None:
    """Fill in `request.usage`, with the tokens that were restored by tier: cached + computed = prompt."""
    request.counted = True
    usage = request.usage
    usage.prompt_tokens = request.prompt_tokens
    usage.cached["hbm"] = found.hbm
    usage.cached.update(restored or {})
    failed = max(0, found.reach - usage.cached_tokens)
    left = request.prompt_tokens - 1 - usage.cached_tokens
    reasons = {"last_token": 1}
    for reason, n in (("load_failed", failed), ("evicted", found.evicted), ("block_rounding", found.rounded)):
        reasons[reason] = min(n, left)
        left -= reasons[reason]
    reasons["never_seen"] = left
    usage.computed = {k: v for k, v in reasons.items() if v}
