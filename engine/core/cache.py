"""Where what is known (`radix/`) and what is where (`tiers/`) meet: the only file that sees both.

It admits a request onto blocks, hands what was computed to the tree, and makes room. It never touches bytes: copies
between tiers are begun through moves.py, for restores.py (up), spills.py (down, for space) and persist.py
(down, for a restart); a copy inside the pool is left to who admits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.lower import Lower
from engine.core.moves import HBM, NVME, RAM, TIERS
from engine.core.request import Request
from radix import DuplicateOf, Path, RadixTree, TailKept
from tiers import SlotAllocator

if TYPE_CHECKING:
    from engine.core.restores import Restore

__all__ = ["HBM", "NVME", "RAM", "Admission", "BlockCache", "Room", "make_cache"]


class Admission(NamedTuple):
    """What admission found: tokens ready to use, and a slot to copy before the first step (or None)."""

    cached: int
    copy: tuple[int, int] | None


class Room(Enum):
    """Whether there is a slot: now, when a copy has landed, or not without taking one from somebody."""

    NOW = "now"
    LATER = "later"
    NONE = "none"


class BlockCache:
    """The tree over one device pool, and what lies below it (`lower`; None: nothing does)."""

    def __init__(self, tree: RadixTree, slots: SlotAllocator, lower: Lower | None = None) -> None:
        self.tree = tree
        self.slots = slots
        self.block_size = tree.block_size
        self.lower = lower

    def namespace(self, fingerprint: bytes, adapter: bytes, salt: bytes) -> Any:
        return self.tree.namespace(fingerprint, adapter, salt)

    # -- looking -----------------------------------------------------------------------------------------

    def look(self, request: Request) -> Path:
        """What is known of the request's tokens, all but the last one: that is always computed."""
        ids = request.prompt if request.generated == 0 else bytes(request.tokens)
        return self.tree.match(request.namespace, ids, limit=request.n_tokens - 1)

    def reach(self, path: Path) -> int:
        """Whole blocks that need not be computed: in HBM, or below it without a hole."""
        return path.n_blocks if self.lower is None else self.tree.reach(path)

    def is_moving(self, path: Path, reach: int) -> bool:
        """Whether what continues the path is on its way: to be admitted when that has landed."""
        return self.lower is not None and self.lower.restores.pending(path, reach)

    def look_ahead(self, request: Request) -> None:
        """A request has come: what lies lowest starts to move."""
        if self.lower is not None and self.lower.looks_ahead:
            path = self.look(request)
            self.lower.restores.look_ahead(request, path, self.reach(path))

    def blocks_for(self, n_tokens: int) -> int:
        """Slots that n tokens and the first sampled one need."""
        return n_tokens // self.block_size + 1

    # -- a request's life --------------------------------------------------------------------------------

    def admit(self, request: Request, path: Path, reach: int) -> Admission | None:
        """Lease `path`, take slots for the rest of the tokens and one decode; None when there is no room (now).

        `reach` is the path's. What lies below HBM begins to move into the first of those slots (`request.restore`). A
        partial block is held as well until it is copied. Where there is no room for that one slot more, its tokens are
        computed again: a prompt may need every slot of the pool, and would wait for ever.
        """
        if reach > path.n_blocks:
            path = path._replace(partial=None)  # the block itself is restored
        admission = self._admit(request, path, reach)
        if admission is None and path.partial is not None:
            admission = self._admit(request, path._replace(partial=None), reach)
        return admission

    def _admit(self, request: Request, path: Path, reach: int) -> Admission | None:
        """Only the first admission that succeeds counts as a use of the path: not a try, nor a preempted request's
        return to its own blocks.
        """
        lease = self.tree.lease(path, request.id, counted=None, reach=reach)
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
        if reach > path.n_blocks:
            assert self.lower is not None
            request.restored_to = reach * self.block_size
            request.restore = self.lower.restores.start(request, path, reach, taken[:reach - path.n_blocks])
        return Admission(cached, copy)

    def _restored(self, restore: Restore) -> None:
        """The request goes on from what was placed."""
        request = restore.request
        assert self.lower is not None
        assert request is not None
        assert request.lease is not None
        if restore.placed:
            request.path = self.tree.path_to(restore.blocks[restore.placed - 1])
            request.lease.advance(request.path)
            request.computed = request.path.n_tokens
        first = restore.first + restore.placed
        own = self.lower.restores.close(restore)
        request.table[first:first + len(own)] = own
        request.restore, request.restored_to = None, 0

    def grow(self, request: Request) -> Room:
        """Room for the token at `computed`."""
        if request.computed // self.block_size < len(request.table):
            return Room.NOW
        taken = self._take(1)
        if taken is None:
            return Room.LATER if self.lower is not None and self.lower.is_coming() else Room.NONE
        request.table += taken
        return Room.NOW

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
        if self.lower is not None:
            self.lower.note(request.id, extended.path)
        return last

    def release(self, request: Request) -> None:
        """The request stops here (finished, cancelled or preempted): what it computed stays, all else goes."""
        if request.lease is None or request.path is None:
            return
        whole = self.commit(request)
        size = self.block_size
        own = request.table[max(whole, request.restored_to // size):]
        if request.restore is not None:
            assert self.lower is not None
            self.lower.restores.leave(request.restore)
        elif request.computed > whole * size:
            slot = own.pop(0)
            kept = self.tree.set_tail(request.path, request.slice(whole * size, request.computed), slot)
            if isinstance(kept, TailKept):
                self.slots.ready((slot,))
                self.slots.free(kept.freed_slots)
            else:
                self.slots.abort((slot,))
        self.slots.abort(own)
        request.lease.release()
        request.restore = request.lease = request.path = None
        request.table = []
        request.computed = request.restored_to = 0
        if self.lower is not None:
            self.lower.spills.look_again()

    # -- between two steps -------------------------------------------------------------------------------

    def tend(self) -> list[Restore]:
        """Take note of copies that ended, begin those that are due; returns the restores that are over, whose
        requests go on."""
        if self.lower is None:
            return []
        self.lower.moves.poll()
        over = self.lower.restores.over()
        for restore in over:
            self._restored(restore)
        self.lower.tend()
        return over

    def available(self) -> int:
        """Slots that are empty or could be made so."""
        return self.slots.free_count + self.tree.evictable(HBM)

    def facts(self, tiers: Sequence[str], block_bytes: int) -> dict[str, Any]:
        """By tier, what there is and what the tree knows of its comings and goings; the tree's other counts; what
        lies below."""
        tree = self.tree.stats()
        known = tree.pop("tiers")
        return {"tiers": {tier: self._tier_facts(tier, block_bytes) | known[tier] for tier in tiers},
                **({} if self.lower is None else self.lower.facts()), "tree": tree}

    def _tier_facts(self, tier: str, block_bytes: int) -> dict[str, Any]:
        slots = self.slots if self.lower is None else self.lower.moves.slots(tier)
        return {"slots": slots.capacity, "used": slots.used_count, "free": slots.free_count,
                "evictable": self.tree.evictable(tier), "bytes": slots.capacity * block_bytes,
                "used_bytes": slots.used_count * block_bytes}

    def audit(self, held: set[int]) -> list[str]:
        """Every disagreement between tree, pools and the slots that running requests own."""
        in_use = {HBM: self.slots.ready_slots() - held}
        problems = []
        if self.lower is not None:
            in_use[HBM] -= self.lower.restores.held()
            in_use |= self.lower.in_use()
        known = self.slots.used()
        problems += [f"slot {s} is in a block table but empty in the pool" for s in sorted(held - known)]
        return self.tree.audit(in_use) + problems

    def _take(self, n: int) -> list[int] | None:
        if n <= 0:
            return []
        if self.lower is not None:
            self.lower.spills.make_room(n)
        else:
            self._make_room(n)
        return self.slots.take(n)

    def _make_room(self, n: int) -> None:
        """With nothing below HBM, what leaves it is forgotten."""
        missing = n - self.slots.free_count
        while 0 < missing <= self.tree.evictable(HBM):
            victims = self.tree.victims(HBM, missing)
            if not victims:
                return
            self.slots.free([v.slot for v in victims])
            self.tree.dropped(HBM, [v.block for v in victims], reason="space")
            missing = n - self.slots.free_count


def make_cache(n_slots: int, block_size: int, clock: Callable[[], float]) -> BlockCache:
    """A cache over a device pool of n_slots, with nothing below it."""
    return BlockCache(RadixTree(block_size=block_size, tiers=(HBM,), clock=clock), SlotAllocator(n_slots))


def make_tiered_cache(block_size: int, clock: Callable[[], float],
                      lower: Callable[[RadixTree], Lower]) -> BlockCache:
    """A cache with tiers below: `lower` makes them for the tree, their store with the device's slots in it."""
    tree = RadixTree(block_size=block_size, tiers=TIERS, clock=clock)
    below = lower(tree)
    return BlockCache(tree, below.moves.slots(HBM), below)
