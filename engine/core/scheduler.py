"""Which tokens the next step computes.

A step has a budget of computed tokens: one for each decode first, then chunks of prefill, the shortest
remainder first, aged. What is cached costs nothing, and a waiter in a flight costs nothing. A chunk ends where
the prompt does, else at a fixed absolute position (a multiple of CHUNK_GRAIN), if what is left of the budget
reaches one.

Admission takes the longest known prefix first, and age counts as known tokens do, so nobody waits for ever. What
is known below HBM is restored after admission, while others run; who waits for a copy that is under way holds up
nobody.
When a decode finds no slot, the request admitted last is preempted: its blocks stay in the tree, and it goes
back to the front of the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from engine.core.account import Found, count
from engine.core.cache import BlockCache, Room
from engine.core.flights import Flights
from engine.core.request import Request, State

if TYPE_CHECKING:
    from radix import Path

#: Chunk ends are multiples of this, so that where a prompt is cut does not depend on who else is running.
CHUNK_GRAIN = 64
#: A second of waiting outweighs this many known tokens (about what one second of prefill computes here).
AGE_TOKENS_PER_S = 1000.0
#: How many of the waiting, oldest first, are matched anew before an admission: bounds the work of a step.
LOOK_AT = 64


class Work(NamedTuple):
    """n tokens of one request to compute now, from its `computed` on; `sample` when they reach its end."""

    request: Request
    n: int
    sample: bool


class Plan(NamedTuple):
    """One step: the work in row order, and the slot copies that must be made before it."""

    work: list[Work]
    copies: list[tuple[int, int]]


class Scheduler:
    """The queue and the running set of one core."""

    def __init__(self, cache: BlockCache, clock: Callable[[], float], *, step_tokens: int, max_running: int,
                 max_waiting: int) -> None:
        self.cache = cache
        self.clock = clock
        self.step_tokens = step_tokens
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.flights = Flights(cache.block_size)
        self.preemptions = 0
        self._version = 0

    def n_waiting(self) -> int:
        return len(self.waiting) + self.flights.waiting()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.cache.look_ahead(request)

    def plan(self) -> Plan:
        """The next step's work; empty when there is nothing to do (now: `add`, or a copy that lands, changes it)."""
        self.note_restores()
        work: list[Work] = []
        preempted = self.preemptions
        decodes = [r for r in self.running if r.state is State.RUNNING and r.remaining == 1]
        for request in decodes:
            if request.state is State.RUNNING and self._grow(request):
                work.append(Work(request, 1, True))
        # A later request's growth may have preempted one that was planned already.
        work = [w for w in work if w.request.state is State.RUNNING]
        decoding = set(decodes)
        copies: list[tuple[int, int]] = []
        if self.preemptions == preempted:  # else there is no room for who runs: nobody new comes in
            self._admit_all(self.step_tokens - len(work), decoding, copies)
        self._fill(self.step_tokens - len(work), decoding, work)
        return Plan(work, copies)

    def advance(self, work: Work) -> None:
        """The step computed it: whole blocks go to the tree, and whoever waited for them wakes."""
        request = work.request
        request.computed += work.n
        blocks = self.cache.commit(request)
        self._requeue(self.flights.landed(request, blocks))

    def finish(self, request: Request) -> None:
        """End a request in any state: leases end, its slots go back, what it computed stays known."""
        if request.state in (State.RUNNING, State.RESTORING):
            self.running.remove(request)
            self.cache.release(request)
            self._requeue(self.flights.lost(request))
        elif request.state is State.IN_FLIGHT:
            self.flights.leave(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        request.state = State.FINISHED
        self._version += 1

    # -- decode ------------------------------------------------------------------------------------------

    def _grow(self, request: Request) -> bool:
        """A slot for the next token, if need be from whoever was admitted last. False where it has to wait: for a
        copy that will free one, or as the one that was preempted itself."""
        while (room := self.cache.grow(request)) is not Room.NOW:
            if room is Room.LATER:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request)
        request.state = State.WAITING
        request.preempted += 1
        request.known_at = -1
        self.preemptions += 1
        woken = self.flights.lost(request)
        self.waiting.insert(0, request)
        self._requeue(woken)

    def note_restores(self) -> None:
        """Copies that ended are noted: who was restored goes on, who waited for it wakes."""
        for restore in self.cache.tend():
            request = restore.request
            assert request is not None
            request.state = State.RUNNING
            if not request.counted:
                assert request.found is not None
                count(request, request.found, restore.tokens(self.cache.block_size))
            self._requeue(self.flights.landed(request, request.computed // self.cache.block_size))

    # -- prefill -----------------------------------------------------------------------------------------

    def _fill(self, budget: int, decoding: set[Request], work: list[Work]) -> None:
        """Chunks of prefill, the shortest remainder first: a turn of 100 new tokens does not wait behind one of
        10,000, which age lets through."""
        now = self.clock()
        prefills = [r for r in self.running if r not in decoding and r.state is State.RUNNING]
        for request in sorted(prefills, key=lambda r: r.remaining - (now - r.arrived) * AGE_TOKENS_PER_S):
            if budget <= 0:
                return
            n = min(budget, request.remaining)
            if n < request.remaining:
                end = (request.computed + n) // CHUNK_GRAIN * CHUNK_GRAIN
                if end > request.computed:
                    n = end - request.computed
            work.append(Work(request, n, n == request.remaining))
            budget -= n

    # -- admission ---------------------------------------------------------------------------------------

    def _admit_all(self, budget: int, decoding: set[Request], copies: list[tuple[int, int]]) -> None:
        """Admit while the step has room, or the next has less to compute than who is running: no more, since
        what is admitted holds slots."""
        held_up: set[Request] = set()
        while self.waiting and len(self.running) < self.max_running:
            remains = [r.remaining for r in self.running if r not in decoding]
            request = self._next(held_up)
            if request is None:
                return
            if sum(remains) >= budget and request.n_tokens - request.known >= min(remains, default=0):
                return
            path = self.cache.look(request)
            reach = self.cache.reach(path)
            if self.cache.is_moving(path, reach):
                held_up.add(request)
            elif not self._admit(request, path, reach, copies):
                return

    def _admit(self, request: Request, path: Path, reach: int, copies: list[tuple[int, int]]) -> bool:
        """Onto slots, or into a flight; False if there is no room for it now."""
        found = self.flights.find(request, reach * self.cache.block_size)
        if found is not None:
            self.waiting.remove(request)
            self.flights.join(request, *found)
            return True
        admission = self.cache.admit(request, path, reach)
        if admission is None:
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING if request.restore is None else State.RESTORING
        if admission.copy is not None:
            copies.append(admission.copy)
        if not request.counted:
            request.found = Found.of(path, reach * self.cache.block_size, request)
            if request.restore is None:
                count(request, request.found)
        self.flights.open(request)
        return True

    def _next(self, held_up: set[Request]) -> Request | None:
        """Longest known prefix first, aged. Preempted requests go before all others, in their order."""
        looked_at = [r for r in self.waiting[:LOOK_AT + len(held_up)] if r not in held_up]
        if not looked_at:
            return None
        if looked_at[0].preempted:
            looked_at = looked_at[:1]
        now = self.clock()
        for request in looked_at:
            if request.known_at != self._version:
                known = self.cache.reach(self.cache.look(request)) * self.cache.block_size
                request.known, request.known_at = known, self._version
        return max(looked_at, key=lambda r: (r.known + (now - r.arrived) * AGE_TOKENS_PER_S, -r.arrived))

    def _requeue(self, woken: list[Request]) -> None:
        """Back into the queue where their arrival puts them: they have waited already. Preempted ones to its front,
        where they came from."""
        if woken:
            everyone = woken + self.waiting
            self.waiting = [r for r in everyone if r.preempted] + sorted(
                (r for r in everyone if not r.preempted), key=lambda r: r.arrived)
