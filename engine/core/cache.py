"""Where what is known (`radix/`) and what is where (`tiers/`) meet: the only file that sees both.

It admits a request onto blocks, hands what was computed to the tree, and makes room. It never touches bytes:
who admits gets the copies to make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.core.request import Request
from radix import DuplicateOf, Path, RadixTree, TailKept
from tiers import SlotAllocator

HBM = "hbm"


class Admission(NamedTuple):
    """What admission found: tokens ready to use, and a slot to copy before the first step (or None)."""

    cached: int
    copy: tuple[int, int] | None


class BlockCache:
    """The tree over one device pool."""

    def __init__(self, tree: RadixTree, slots: SlotAllocator) -> None:
        self.tree = tree
        self.slots = slots
        self.block_size = tree.block_size

    def namespace(self, fingerprint: bytes, adapter: bytes, salt: bytes) -> Any:
        return self.tree.namespace(fingerprint, adapter, salt)

    def look(self, request: Request) -> Path:
        """What is known of the request's tokens, all but the last one: that is always computed."""
        ids = request.prompt if request.generated == 0 else bytes(request.tokens)
        return self.tree.match(request.namespace, ids, limit=request.n_tokens - 1)

    def blocks_for(self, n_tokens: int) -> int:
        """Slots that n tokens and the first sampled one need."""
        return n_tokens // self.block_size + 1

    def admit(self, request: Request, path: Path) -> Admission | None:
        """Lease `path`, take slots for the rest of the tokens and one decode; None when there is no room.

        A partial block is held as well until it is copied. Where there is no room for that one slot more, its tokens
        are computed again: a prompt may need every slot of the pool, and would wait for ever.
        """
        admission = self._admit(request, path)
        if admission is None and path.partial is not None:
            admission = self._admit(request, path._replace(partial=None))
        return admission

    def _admit(self, request: Request, path: Path) -> Admission | None:
        """Only the first admission that succeeds counts as a use of the path: not a try, nor a preempted request's
        return to its own blocks.
        """
        lease = self.tree.lease(path, request.id, counted=None)
        # One that was preempted may have tokens for the whole pool: then it ends before the next decode.
        wanted = min(self.blocks_for(request.n_tokens), self.slots.capacity)
        taken = self._take(wanted - path.n_blocks)
        if taken is None:
            lease.release()
            return None
        lease.confirm(counted=not request.counted)
        request.path, request.lease = path, lease
        request.table = [*self.tree.slots(path, HBM).tolist(), *taken]
        cached, copy = path.n_tokens, None
        if path.partial is not None:
            cached += path.partial.n_tokens
            copy = path.partial.slot, taken[0]
        request.computed = cached
        return Admission(cached, copy)

    def grow(self, request: Request) -> bool:
        """Room for the token at `computed`."""
        if request.computed // self.block_size < len(request.table):
            return True
        taken = self._take(1)
        if taken is None:
            return False
        request.table += taken
        return True

    def commit(self, request: Request) -> int:
        """Give the tree the whole blocks computed since the last commit; returns the blocks it now has."""
        assert request.path is not None
        assert request.lease is not None
        first, last = request.path.n_blocks, request.computed // self.block_size
        if last <= first:
            return first
        mine = request.table[first:last]
        size = self.block_size
        extended = self.tree.extend(request.path, request.slice(first * size, last * size), mine)
        for i, outcome in enumerate(extended.outcomes):
            if isinstance(outcome, DuplicateOf):
                self.slots.abort((mine[i],))
                request.table[first + i] = outcome.slot
            else:
                self.slots.ready((mine[i],))
        self.slots.free(extended.freed_slots)
        request.path = extended.path
        request.lease.advance(extended.path)
        return last

    def release(self, request: Request) -> None:
        """The request stops here (finished, cancelled or preempted): what it computed stays, all else goes."""
        if request.lease is None or request.path is None:
            return
        whole = self.commit(request)
        size = self.block_size
        own = request.table[whole:]
        if request.computed > whole * size:
            slot = own.pop(0)
            kept = self.tree.set_tail(request.path, request.slice(whole * size, request.computed), slot)
            if isinstance(kept, TailKept):
                self.slots.ready((slot,))
                self.slots.free(kept.freed_slots)
            else:
                self.slots.abort((slot,))
        self.slots.abort(own)
        request.lease.release()
        request.lease = request.path = None
        request.table = []
        request.computed = 0

    def available(self) -> int:
        """Slots that are empty or could be made so."""
        return self.slots.free_count + self.tree.evictable(HBM)

    def audit(self, held: set[int]) -> list[str]:
        """Every disagreement between tree, pool and the slots that running requests own."""
        problems = self.tree.audit({HBM: self.slots.used() - held})
        known = self.slots.used()
        problems += [f"slot {s} is in a block table but empty in the pool" for s in sorted(held - known)]
        return problems

    def _take(self, n: int) -> list[int] | None:
        if n <= 0:
            return []
        missing = n - self.slots.free_count
        while missing > 0:
            if missing > self.tree.evictable(HBM):
                return None
            victims = self.tree.victims(HBM, missing)
            if not victims:
                return None
            self.slots.free([v.slot for v in victims])
            self.tree.dropped(HBM, [v.block for v in victims], reason="space")
            missing = n - self.slots.free_count
        return self.slots.take(n)


def make_cache(n_slots: int, block_size: int, clock: Callable[[], float]) -> BlockCache:
    """A cache over a device pool of n_slots."""
    return BlockCache(RadixTree(block_size=block_size, tiers=(HBM,), clock=clock), SlotAllocator(n_slots))
