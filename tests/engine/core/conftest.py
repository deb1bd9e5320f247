from __future__ import annotations

from collections.abc import Callable

import pytest
from chain_core import VOCAB, Bench, ChainRunner, Clock

from engine.core.cache import make_cache
from engine.core.core import Core
from engine.core.scheduler import Scheduler


@pytest.fixture
def make() -> Callable[..., Bench]:
    def build(slots: int = 64, block_size: int = 4, *, step_tokens: int = 512, max_running: int = 16,
              max_waiting: int = 64, max_context: int = 4096) -> Bench:
        clock = Clock()
        runner = ChainRunner(slots, block_size)
        scheduler = Scheduler(make_cache(slots, block_size, clock), clock, step_tokens=step_tokens,
                              max_running=max_running, max_waiting=max_waiting)
        core = Core(scheduler, runner, vocab_size=VOCAB, max_context=max_context, eos_ids=(), fingerprint=b"f",
                    clock=clock)
        return Bench(core, runner, clock)
    return build
