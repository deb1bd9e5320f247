"""The core: requests in, one step after another, deltas out. No sockets, no threads, no locks.

    add ─► waiting ─► (plan: match, flight, admit) ─► running: execute ─► advance ─► sample ─► delta
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from engine.core.cache import HBM, BlockCache
from engine.core.counters import Counters
from engine.core.layout import Rows
from engine.core.messages import Delta, GenerateRequest, Usage
from engine.core.request import BYTES_PER_ID, Request, State
from engine.core.scheduler import Plan, Scheduler
from engine.errors import ContextLengthError, OverloadedError, RequestError, TrunklineError
from engine.model.sampler import SampleRow, sample


class Runner(Protocol):
    """What the core needs of a device."""

    def execute(self, batch: list[Rows]) -> Tensor: ...
    def copy_slot(self, source: int, target: int) -> None: ...


class Core:
    """One model, one device pool, one loop.

    `on_logits(request, position, row)` is called with each row of logits before sampling; tests compare them.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, vocab_size: int, max_context: int,
                 eos_ids: tuple[int, ...], fingerprint: bytes, clock: Callable[[], float],
                 block_bytes: int = 0,
                 on_logits: Callable[[Request, int, Tensor], None] | None = None) -> None:
        self.scheduler = scheduler
        self.cache: BlockCache = scheduler.cache
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.pool_tokens = self.cache.slots.capacity * self.cache.block_size
        self.eos_ids = eos_ids
        self.fingerprint = fingerprint
        self.clock = clock
        self.on_logits = on_logits
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.tiers = (HBM,) if self.cache.lower is None else self.cache.lower.tiers()
        if self.cache.lower is not None:
            self.cache.lower.spills.recompute_s = self.counters.recompute_s
        self.block_bytes = block_bytes

    # -- in ----------------------------------------------------------------------------------------------

    def add(self, asked: GenerateRequest) -> None:
        """Queue a request. Raises RequestError (nothing is kept then)."""
        self._check(asked)
        s = asked.sampling
        stop_ids = frozenset(s.stop_token_ids) | (frozenset() if s.ignore_eos else frozenset(self.eos_ids))
        request = Request(
            id=asked.id, namespace=self.cache.namespace(self.fingerprint, b"", asked.namespace),
            prompt=asked.ids, tokens=bytearray(asked.ids), prompt_tokens=len(asked.ids) // BYTES_PER_ID, sampling=s,
            usage=Usage(cached=dict.fromkeys(self.tiers, 0)),
            seed=secrets.randbits(63) if s.seed is None else s.seed, arrived=self.clock(), stop_ids=stop_ids)
        self.requests[asked.id] = request
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> Delta | None:
        """Stop a request wherever it is; None if it is not (any more) here."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        return self._end(request, Delta(request_id, finish="cancelled"))

    def has_work(self) -> bool:
        return bool(self.requests)

    def next_due(self) -> float | None:
        """Seconds until `tend` has something to do though no request comes and no copy ends; None: never."""
        return None if self.cache.lower is None else self.cache.lower.next_due()

    @property
    def wake_fd(self) -> int | None:
        """Readable when a copy has ended."""
        return None if self.cache.lower is None else self.cache.lower.store.wake.fd

    def tend(self) -> None:
        """What goes on between steps when there are none: copies that end, blocks to persist."""
        self.scheduler.note_restores()

    def flush(self, seconds: float) -> tuple[int, int]:
        """Before an orderly end: persist what is not yet. Returns blocks written, and paths left."""
        return (0, 0) if self.cache.lower is None else self.cache.lower.flush(seconds)

    def close(self) -> None:
        """Nothing is asked of this core any more: its folder is let go."""
        if self.cache.lower is not None:
            self.cache.lower.close()

    # -- a step ------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Plan, execute, sample; what came of it for each request."""
        plan = self.scheduler.plan()
        if not plan.work:
            return []
        began = self.clock()
        logits = self._execute(plan)
        for work in plan.work:
            self.scheduler.advance(work)
        deltas = self._sample([w.request for w in plan.work if w.sample], logits)
        deltas += [Delta(w.request.id, prefilled=w.request.computed, prefill_total=w.request.n_tokens)
                   for w in plan.work if not w.sample]
        self.counters.step(plan.work, self.clock() - began)
        return deltas

    def fail_running(self, error: Exception) -> list[Delta]:
        """A step raised: everything that was in it ends with an error, and the core lives on."""
        message = error.message if isinstance(error, TrunklineError) else f"{type(error).__name__}: {error}"
        return [self._end(r, Delta(r.id, finish="error", error=f"the step failed: {message}"))
                for r in list(self.scheduler.running)]

    def stats(self) -> dict[str, Any]:
        """What /v1/cache/stats shows (plain numbers and texts)."""
        return {
            **self.cache.facts(self.tiers, self.block_bytes),
            "requests": {"running": len(self.scheduler.running), "waiting": self.scheduler.n_waiting(),
                         "flights": len(self.scheduler.flights),
                         "joined_flights": self.scheduler.flights.joined,
                         "preempted": self.scheduler.preemptions, **self.counters.requests()},
            "tokens": self.counters.tokens(self.tiers),
            "speeds": self.counters.speeds(),
        }

    # -- inside ------------------------------------------------------------------------------------------

    def _check(self, asked: GenerateRequest) -> None:
        n = len(asked.ids) // BYTES_PER_ID
        if n == 0 or len(asked.ids) % BYTES_PER_ID:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        if asked.id in self.requests:
            raise RequestError(f"a request with id {asked.id!r} is already running")
        if self.scheduler.n_waiting() >= self.scheduler.max_waiting:
            raise OverloadedError(f"{self.scheduler.max_waiting} requests are waiting already; try again later")
        if n >= self.max_context:
            raise ContextLengthError(
                f"the prompt has {n} tokens, and this model's context is {self.max_context}: at most "
                f"{self.max_context - 1} leave room for an answer")
        if self.cache.blocks_for(n) > self.cache.slots.capacity:
            raise ContextLengthError(
                f"the prompt has {n} tokens, and the device pool holds {self.pool_tokens}: "
                f"start the server with a larger --hbm")
        ids = memoryview(asked.ids).cast("i")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise RequestError(f"a token id lies outside the vocabulary of {self.vocab_size}: "
                               f"{min(ids) if min(ids) < 0 else max(ids)}", param="prompt")

    def _execute(self, plan: Plan) -> Tensor:
        for source, target in plan.copies:
            self.runner.copy_slot(source, target)
        return self.runner.execute([
            Rows(r.slice(r.computed, r.computed + n), r.table, r.computed, n, wanted)
            for r, n, wanted in plan.work])

    def _sample(self, requests: list[Request], logits: Tensor) -> list[Delta]:
        if not requests:
            return []
        if self.on_logits is not None:
            for request, row in zip(requests, logits, strict=True):
                self.on_logits(request, request.n_tokens, row)
        result = sample(logits, [self._row(r) for r in requests])
        deltas = []
        for i, request in enumerate(requests):
            logprobs = result.logprobs[i] if request.sampling.logprobs is not None else None
            deltas.append(self._took(request, result.tokens[i], logprobs))
        return deltas

    @staticmethod
    def _row(request: Request) -> SampleRow:
        early = request.generated < request.sampling.min_tokens
        return SampleRow(request.sampling, request.seed, request.generated,
                         tuple(request.stop_ids) if early else ())

    def _took(self, request: Request, token: int, logprobs: Any) -> Delta:
        """One sampled token: kept, or the end."""
        request.usage.completion_tokens += 1
        if token in request.stop_ids:
            return self._end(request, Delta(request.id, finish="stop", stop_token=token))
        raw = token.to_bytes(BYTES_PER_ID, "little", signed=True)
        request.tokens += raw
        delta = Delta(request.id, raw, None if logprobs is None else [logprobs])
        full = (request.generated >= request.sampling.max_tokens or request.n_tokens >= self.max_context
                or self.cache.blocks_for(request.computed) > self.cache.slots.capacity)
        if full:
            delta.finish = "length"
            return self._end(request, delta)
        return delta

    def _end(self, request: Request, delta: Delta) -> Delta:
        self.scheduler.finish(request)
        del self.requests[request.id]
        delta.usage = request.usage
        self.counters.ended(request, delta.finish)
        return delta

    def audit(self) -> list[str]:
        """Every broken invariant of tree, pool and block tables (none, if all is well)."""
        held: set[int] = set()
        problems = []
        for r in self.scheduler.running:
            assert r.path is not None
            held |= set(r.table[max(r.path.n_blocks, r.restored_to // self.cache.block_size):])
            if r.state is not (State.RUNNING if r.restore is None else State.RESTORING):
                problems.append(f"request {r.id} is in the running set and {r.state.value}")
        return problems + self.cache.audit(held)

