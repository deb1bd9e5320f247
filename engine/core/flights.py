"""Flights: runs of tokens that one request computes and others wait for.

A flight opens at admission for the whole uncached prompt of its leader. A request that shares more whole
blocks with it than the tree has ready waits in it: it holds no slots and uses no step budget. It wakes when
its last shared block is committed, or when the leader goes away; then it is matched anew, and the first one
awake leads what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.core.request import BYTES_PER_ID, Request, State


def common_prefix_tokens(a: bytes | bytearray, b: bytes | bytearray, known: int = 0) -> int:
    """How many leading tokens agree, given that the first `known` do. O(log n) comparisons of slices."""
    low, high = known, min(len(a), len(b)) // BYTES_PER_ID
    va, vb = memoryview(a), memoryview(b)
    step = 16
    while low < high:
        end = min(low + step, high)
        if va[low * BYTES_PER_ID:end * BYTES_PER_ID] == vb[low * BYTES_PER_ID:end * BYTES_PER_ID]:
            low, step = end, step * 4
        elif end - low == 1:
            break
        else:
            high, step = end, max(1, (end - low) // 2)
    return low


@dataclass(slots=True, eq=False)
class Flight:
    """What `leader` computes: its tokens up to `end`. `waiters` maps each to the block count it needs."""

    leader: Request
    namespace: Any
    end: int
    waiters: dict[Request, int] = field(default_factory=dict)


class Flights:
    """The open flights of one core. At most one a running request."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._open: dict[Request, Flight] = {}
        self.joined = 0

    def __len__(self) -> int:
        return len(self._open)

    def waiting(self) -> int:
        return sum(len(f.waiters) for f in self._open.values())

    def open(self, leader: Request) -> None:
        self._open[leader] = Flight(leader, leader.namespace, leader.n_tokens)

    def find(self, request: Request, ready_tokens: int) -> tuple[Flight, int] | None:
        """The flight that will have more whole blocks of `request` than `ready_tokens`, and how many.

        The last token of a prompt is always computed by its own request, so it never counts as shared.
        """
        best: tuple[Flight, int] | None = None
        for flight in self._open.values():
            if flight.namespace != request.namespace:
                continue
            limit = min(flight.end, request.n_tokens - 1)
            shared = min(common_prefix_tokens(flight.leader.tokens, request.tokens), limit) // self._size
            if shared * self._size > ready_tokens and (best is None or shared > best[1]):
                best = flight, shared
        return best

    def join(self, request: Request, flight: Flight, blocks: int) -> None:
        flight.waiters[request] = blocks
        request.flight = flight
        request.state = State.IN_FLIGHT
        self.joined += 1

    def leave(self, request: Request) -> None:
        """A waiter goes away (cancel)."""
        if request.flight is not None:
            request.flight.waiters.pop(request, None)
            request.flight = None

    def landed(self, leader: Request, committed_blocks: int) -> list[Request]:
        """Waiters whose last shared block is committed; the flight closes once its run is computed."""
        flight = self._open.get(leader)
        if flight is None:
            return []
        done = leader.computed >= flight.end
        return self._wake(flight, [w for w, need in flight.waiters.items() if done or need <= committed_blocks],
                          close=done)

    def lost(self, leader: Request) -> list[Request]:
        """The leader goes away (finished, cancelled, preempted): every waiter is to be matched anew."""
        flight = self._open.get(leader)
        return [] if flight is None else self._wake(flight, list(flight.waiters), close=True)

    def _wake(self, flight: Flight, who: Iterable[Request], *, close: bool) -> list[Request]:
        woken = list(who)
        for waiter in woken:
            del flight.waiters[waiter]
            waiter.flight = None
            waiter.state = State.WAITING
        if close:
            del self._open[flight.leader]
        return woken
