"""How a step's rows lie: which rows attend in one call, over which slots, under which mask.

Built once a step on the CPU, used for each layer. Decodes come first, grouped by padded length (one call a
group), then chunks (a call each).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import paged_cpu as paged

#: The most K and V that decodes gather for one call. One call for many keeps all cores busy; more than the cache holds
#: is written and read through memory (2 x Zen 4, 2026-11-30, `python -m bench.kv_layout`).
GATHER_BYTES = 4 << 20

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Rows(NamedTuple):
    """n consecutive tokens of one sequence: ids int32 LE, its block table, where they start, logits wanted."""

    ids: bytes
    table: Sequence[int]
    start: int
    n: int
    logits: bool

    @property
    def end(self) -> int:
        return self.start + self.n

    @property
    def keys(self) -> int:
        """Keys that its attention reads, padded."""
        return paged.padded_length(self.end)


class Part(NamedTuple):
    """Rows that attend in one call: a chunk, or decodes of equal padded length.

    `first`: where a single sequence's slots are adjacent, the first of them; they are then read in place.
    """

    rows: slice
    slots: Tensor
    first: int | None
    mask: Tensor
    sequences: int
    is_chunk: bool


class PagedStep:
    """The attention of one step."""

    def __init__(self, pool: Tensor, slot_mapping: Tensor, parts: list[Part], scale: float, scratch: Tensor) -> None:
        self._pool = pool
        self._mapping = slot_mapping
        self._parts = parts
        self._scale = scale
        self._scratch = scratch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See engine.model.decoder.Attention."""
        pool = self._pool[layer]
        paged.kv_write(pool, k, v, self._mapping)
        out = [self._attend(pool, part, q[part.rows]) for part in self._parts]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend(self, pool: Tensor, part: Part, q: Tensor) -> Tensor:
        if part.first is not None:
            k, v = paged.adjacent(pool, part.first, part.slots.numel())
        else:
            k, v = paged.gather(pool, part.slots, part.sequences, self._scratch)
        if part.is_chunk:
            return paged.extend(q, k[0], v[0], part.mask, self._scale)
        return paged.decode(q, k, v, part.mask, self._scale)


class Layout(NamedTuple):
    """A step in row order."""

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    parts: list[Part]
    logit_rows: list[int]


def lay_out(batch: Sequence[Rows], *, n_slots: int, block_size: int, group: int, dtype: torch.dtype,
            key_bytes: int) -> Layout:
    """`group` is the number of query heads a KV head, `key_bytes` what K and V of a token take in one layer.

    `logit_rows` are in the batch's own order.
    """
    order = sorted(range(len(batch)), key=lambda i: (batch[i].n > 1, batch[i].keys))
    rows = [batch[i] for i in order]
    bounds = [0, *np.cumsum([r.n for r in rows]).tolist()]
    ids = np.frombuffer(b"".join(r.ids for r in rows), "<i4").astype(np.int64)
    positions = np.concatenate([np.arange(r.start, r.end) for r in rows])
    mapping = np.concatenate([_mapping(r, block_size) for r in rows])
    parts, at = [], 0
    for (is_chunk, keys), alike in groupby(rows, key=lambda r: (r.n > 1, r.keys)):
        together = 1 if is_chunk else max(1, GATHER_BYTES // (keys * key_bytes))
        members = list(alike)
        for first in range(0, len(members), together):
            some = members[first:first + together]
            where = slice(bounds[at], bounds[at + len(some)])
            parts.append(_part(some, where, keys, is_chunk, n_slots, block_size, group, dtype))
            at += len(some)
    last = {i: bounds[at + 1] - 1 for at, i in enumerate(order) if batch[i].logits}
    return Layout(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(mapping), parts,
                  [last[i] for i in sorted(last)])


def _part(rows: list[Rows], where: slice, keys: int, is_chunk: bool, n_slots: int, block_size: int, group: int,
          dtype: torch.dtype) -> Part:
    n_blocks = keys // block_size
    slots = torch.from_numpy(np.concatenate([_padded_table(r, n_blocks) for r in rows]))
    first = _adjacent(rows[0], n_blocks, n_slots) if len(rows) == 1 else None
    if is_chunk:
        mask = paged.extend_mask(rows[0].start, rows[0].n, keys, group, dtype)
    else:
        mask = paged.decode_mask(torch.tensor([r.end for r in rows]), keys, dtype)
    return Part(where, slots, first, mask, len(rows), is_chunk)


def _mapping(rows: Rows, block_size: int) -> Ints:
    """Where each row's K and V go: slot * block_size + offset."""
    at = np.arange(rows.start, rows.end)
    return np.asarray(rows.table, np.int64)[at // block_size] * block_size + at % block_size


def _padded_table(rows: Rows, n_blocks: int) -> Ints:
    """The table up to n_blocks; what lies beyond the sequence reads slot 0, masked."""
    table = np.zeros(n_blocks, np.int64)
    used = min(len(rows.table), n_blocks)
    table[:used] = rows.table[:used]
    return table


def _adjacent(rows: Rows, n_blocks: int, n_slots: int) -> int | None:
    """The first slot, if all slots up to n_blocks (behind the sequence: whoever's, masked) follow each other."""
    first, used = rows.table[0], min(len(rows.table), n_blocks)
    if first + n_blocks > n_slots or rows.table[used - 1] != first + used - 1:
        return None
    return first if np.array_equal(rows.table[:used], np.arange(first, first + used)) else None
