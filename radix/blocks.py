"""Everything that is known of a single block, in columns indexed by block id.

A column is an `array` (fast for one value) with a numpy view over the same memory (`…_v`, fast for many).
Columns grow by doubling and never shrink; ids are handed out again after `free`. `born` is a serial number
that no two blocks share, so (id, born) names a block for good even though its id may come back.

    column     bytes  meaning
    resident   1      bit t: in tier t
    queued     1      bit t: has an entry in tier t's heap of candidates
    missed     1      bit t: left tier t, and was not wanted since (wanted.py)
    slot[t]    4      its place in tier t; -1 where it is not resident
    node       4      id of the node that owns it
    depth      4      blocks before it on its path
    born       4      serial number of its first adoption
    uses       4      how many leases found it (beside what its node has pending)
    last_use   8      clock, seconds (beside what its node has pending)
    digest     16     its name outside the process; allocated at the first one wanted; all zero: not computed
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from radix.digest import DIGEST_BYTES
from radix.errors import ArgumentError

IntArray = npt.NDArray[np.int32]

MAX_TIERS = 8  # a byte of residence bits
_NO_DIGEST = bytes(DIGEST_BYTES)


def _grown(typecode: str, old: Any, capacity: int, fill: int = 0) -> Any:
    """A new array of `capacity` values that begins with the old ones."""
    new = array(typecode, bytes(array(typecode).itemsize * capacity))
    view = np.frombuffer(new, dtype=typecode)
    view[: len(old)] = old
    if fill:
        view[len(old) :] = fill
    return new


class Blocks:
    """The columns, and who is free."""

    def __init__(self, n_tiers: int, capacity: int = 1024) -> None:
        if not 1 <= n_tiers <= MAX_TIERS:
            raise ArgumentError(f"{n_tiers} tiers: a tree takes 1 to {MAX_TIERS}")
        self.n_tiers = n_tiers
        self.capacity = 0
        self.high = 0  # ids ever handed out: 0 … high - 1
        self.serial = 0
        self._free: IntArray = np.empty(0, np.int32)
        self.n_free = 0
        self.resident = self.queued = self.missed = array("B")
        self.slot: list[array[int]] = [array("i") for _ in range(n_tiers)]
        self.node, self.depth = array("i"), array("i")
        self.born, self.uses = array("I"), array("I")
        self.last_use = array("d")
        self._digest: bytearray | None = None
        self._grow(capacity)

    @property
    def in_use(self) -> int:
        """How many ids are known now."""
        return self.high - self.n_free

    def _grow(self, capacity: int) -> None:
        self.resident = _grown("B", self.resident, capacity)
        self.queued = _grown("B", self.queued, capacity)
        self.missed = _grown("B", self.missed, capacity)
        self.slot = [_grown("i", column, capacity, fill=-1) for column in self.slot]
        self.node = _grown("i", self.node, capacity)
        self.depth = _grown("i", self.depth, capacity)
        self.born = _grown("I", self.born, capacity)
        self.uses = _grown("I", self.uses, capacity)
        self.last_use = _grown("d", self.last_use, capacity)
        self.resident_v = np.frombuffer(self.resident, np.uint8)
        self.queued_v = np.frombuffer(self.queued, np.uint8)
        self.missed_v = np.frombuffer(self.missed, np.uint8)
        self.slot_v: list[IntArray] = [np.frombuffer(column, np.int32) for column in self.slot]
        self.node_v: IntArray = np.frombuffer(self.node, np.int32)
        self.depth_v: IntArray = np.frombuffer(self.depth, np.int32)
        self.born_v = np.frombuffer(self.born, np.uint32)
        self.uses_v = np.frombuffer(self.uses, np.uint32)
        self.last_use_v = np.frombuffer(self.last_use, np.float64)
        if self._digest is not None:
            self._digest.extend(bytes(DIGEST_BYTES * (capacity - self.capacity)))
        self.capacity = capacity

    def allocate(self, n: int, node: int, depth: int, now: float) -> IntArray:
        """Ids for `n` new blocks of `node`, the first at `depth`; resident nowhere yet."""
        reused = min(n, self.n_free)
        fresh = n - reused
        if self.high + fresh > self.capacity:
            self._grow(max(2 * self.capacity, self.high + fresh))
        ids: IntArray = np.empty(n, np.int32)
        if reused:
            ids[:reused] = self._free[self.n_free - reused : self.n_free]
        if fresh:
            ids[reused:] = np.arange(self.high, self.high + fresh)
        self.n_free -= reused
        self.high += fresh
        if n == 1:  # a decoded block: numpy's calls would cost ten times the stores
            block = int(ids[0])
            self.node[block], self.depth[block], self.born[block] = node, depth, self.serial + 1
            self.uses[block], self.last_use[block] = 0, now
        else:
            self.node_v[ids] = node
            self.depth_v[ids] = np.arange(depth, depth + n)
            self.born_v[ids] = np.arange(self.serial + 1, self.serial + n + 1)
            self.uses_v[ids] = 0
            self.last_use_v[ids] = now
        self.serial += n
        return ids

    def put(self, tier: int, ids: IntArray, slots: IntArray) -> None:
        """`ids` are in `tier`, in these slots."""
        if len(ids) == 1:
            block = int(ids[0])
            self.resident[block] |= 1 << tier
            self.slot[tier][block] = int(slots[0])
        else:
            self.resident_v[ids] |= 1 << tier
            self.slot_v[tier][ids] = slots

    def free(self, block: int) -> None:
        """Give a block's id back; it is resident nowhere."""
        assert not self.resident[block], f"block {block} is freed while resident"
        self.queued[block] = self.missed[block] = 0
        self.born[block] = 0  # nobody's, until it is handed out again
        if self._digest is not None:
            at = block * DIGEST_BYTES
            self._digest[at : at + DIGEST_BYTES] = _NO_DIGEST
        if self.n_free == len(self._free):
            grown: IntArray = np.empty(max(1024, 2 * self.n_free), np.int32)
            grown[: self.n_free] = self._free
            self._free = grown
        self._free[self.n_free] = block
        self.n_free += 1

    def free_ids(self) -> IntArray:
        """A copy of the free ids, for the audit."""
        return self._free[: self.n_free].copy()

    def count(self, ids: IntArray, tier: int) -> int:
        """How many of `ids` are resident in `tier`."""
        return int(np.count_nonzero(self.resident_v[ids] & (1 << tier)))

    def digest(self, block: int) -> bytes | None:
        """The digest if it was computed before."""
        if self._digest is None:
            return None
        found = bytes(self._digest[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES])
        return None if found == _NO_DIGEST else found

    def remember_digest(self, block: int, digest: bytes) -> None:
        if self._digest is None:
            self._digest = bytearray(DIGEST_BYTES * self.capacity)
        self._digest[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest
