"""Universes of random requests, cancels, faults and tiny pools: right answers, clean audits, progress, and an end."""

from __future__ import annotations

import pytest
from soak_core import Soak


@pytest.mark.parametrize("seed", range(30))
def test_a_crowd_on_a_tiny_pool(seed: int) -> None:
    Soak(seed).run(120)


@pytest.mark.slow
def test_crowds_on_tiny_pools_for_long() -> None:
    preemptions = joined = 0
    for seed in range(100, 140):
        soak = Soak(seed)
        soak.run(250)
        preemptions += soak.core.scheduler.preemptions
        joined += soak.core.scheduler.flights.joined
    assert preemptions > 50
    assert joined > 50
