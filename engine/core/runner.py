"""Runs a step on the device: rows of tokens in, logits out. It owns the device pool and its layout.

On a CPU the pool is `[layers, 2, kv_heads, slots, block_size, head_dim]`, so that attention gathers one head's
blocks in whole pieces (kernels/paged_cpu.py). Everything outside sees a block as
`[layer][K|V][block_size][kv_heads][head_dim]`, through `read_block` and `write_block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from kernels import paged_cpu as paged


class Rows(NamedTuple):
    """n consecutive tokens of one sequence: ids int32 LE, its block table, where they start, logits wanted."""

    ids: bytes
    table: Sequence[int]
    start: int
    n: int
    logits: bool


class _Chunk(NamedTuple):
    rows: slice
    slots: Tensor
    mask: Tensor


class _Decodes(NamedTuple):
    rows: slice
    slots: Tensor
    mask: Tensor
    sequences: int


class PagedStep:
    """The attention of one step: built once, called for each layer."""

    def __init__(self, pool: Tensor, slot_mapping: Tensor, decodes: list[_Decodes], chunks: list[_Chunk],
                 scale: float, scratch: Tensor) -> None:
        self._pool = pool
        self._scratch = scratch
        self._mapping = slot_mapping
        self._decodes = decodes
        self._chunks = chunks
        self._scale = scale

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See engine.model.decoder.Attention."""
        pool = self._pool[layer]
        paged.kv_write(pool, k, v, self._mapping)
        parts = []
        for d in self._decodes:
            keys, values = paged.gather(pool, d.slots, d.sequences, self._scratch)
            parts.append(paged.decode(q[d.rows], keys, values, d.mask, self._scale))
        for c in self._chunks:
            keys, values = paged.gather(pool, c.slots, 1, self._scratch)
            parts.append(paged.extend(q[c.rows], keys[0], values[0], c.mask, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class CpuRunner:
    """The decoder over a pool of `n_slots` blocks in RAM."""

    def __init__(self, decoder: Decoder, config: ModelConfig, *, n_slots: int, block_size: int,
                 dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.config = config
        self.block_size = block_size
        self.dtype = dtype
        self.pool = torch.zeros(config.n_layers, 2, config.n_kv_heads, n_slots, block_size, config.head_dim,
                                dtype=dtype)
        self._scale = config.head_dim ** -0.5
        self._scratch = torch.empty(0, dtype=dtype)

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: all layers, K and V."""
        return config.n_layers * 2 * block_size * config.n_kv_heads * config.head_dim * dtype.itemsize

    @torch.inference_mode()
    def execute(self, batch: Sequence[Rows]) -> Tensor:
        """Compute every row, store its KV; logits [m, vocab] f32 of the last row of each that wants them.

        The order of the logits is the order of the batch.
        """
        order = sorted(range(len(batch)), key=lambda i: (batch[i].n > 1, paged.padded_length(self._end(batch[i]))))
        ids = torch.from_numpy(np.concatenate([np.frombuffer(batch[i].ids, "<i4") for i in order])
                               .astype(np.int64))
        starts = np.cumsum([0] + [batch[i].n for i in order])
        positions = torch.from_numpy(np.concatenate(
            [np.arange(batch[i].start, self._end(batch[i])) for i in order]))
        step = self._step([batch[i] for i in order], starts)
        hidden = self.decoder.forward(ids, positions, step)
        last = {i: int(starts[at + 1]) - 1 for at, i in enumerate(order) if batch[i].logits}
        if not last:
            return torch.empty(0, self.config.vocab_size)
        return self.decoder.logits(hidden.index_select(0, torch.tensor([last[i] for i in sorted(last)])))

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int) -> None:
        """Slot to slot, all layers."""
        self.pool[:, :, :, target] = self.pool[:, :, :, source]

    def read_block(self, slot: int) -> Tensor:
        """[layers, 2, block_size, kv_heads, head_dim], a contiguous copy."""
        return self.pool[:, :, :, slot].transpose(2, 3).contiguous()

    @torch.inference_mode()
    def write_block(self, slot: int, block: Tensor) -> None:
        """The opposite of read_block."""
        self.pool[:, :, :, slot] = block.transpose(2, 3)

    @staticmethod
    def _end(rows: Rows) -> int:
        return rows.start + rows.n

    def _step(self, batch: Sequence[Rows], starts: np.ndarray) -> PagedStep:
        mapping, decodes, chunks = [], [], []
        same: list[tuple[int, Rows]] = []
        for i, rows in enumerate(batch):
            at = np.arange(rows.start, self._end(rows))
            table = np.asarray(rows.table, np.int64)
            mapping.append(table[at // self.block_size] * self.block_size + at % self.block_size)
            if rows.n > 1:
                chunks.append(self._chunk(rows, slice(int(starts[i]), int(starts[i + 1]))))
                continue
            same.append((int(starts[i]), rows))
            later = batch[i + 1] if i + 1 < len(batch) else None
            if later is None or later.n > 1 or (paged.padded_length(self._end(later))
                                                != paged.padded_length(self._end(rows))):
                decodes.append(self._group(same))
                same = []
        largest = max([d.slots.numel() for d in decodes] + [c.slots.numel() for c in chunks])
        need = paged.scratch_size(self.pool[0], largest)
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=self.dtype)
        return PagedStep(self.pool, torch.from_numpy(np.concatenate(mapping)), decodes, chunks, self._scale,
                         self._scratch)

    def _chunk(self, rows: Rows, where: slice) -> _Chunk:
        keys = paged.padded_length(self._end(rows))
        group = self.config.n_heads // self.config.n_kv_heads
        return _Chunk(where, torch.from_numpy(self._padded_table(rows, keys)),
                      paged.extend_mask(rows.start, rows.n, keys, group, self.dtype))

    def _group(self, same: list[tuple[int, Rows]]) -> _Decodes:
        first = same[0][0]
        keys = paged.padded_length(self._end(same[0][1]))
        tables = np.concatenate([self._padded_table(rows, keys) for _, rows in same])
        lengths = torch.tensor([self._end(rows) for _, rows in same])
        return _Decodes(slice(first, first + len(same)), torch.from_numpy(tables),
                        paged.decode_mask(lengths, keys, self.dtype), len(same))

    def _padded_table(self, rows: Rows, keys: int) -> np.ndarray:
        """The table up to `keys` tokens; what lies beyond the sequence reads slot 0, masked."""
        table = np.zeros(keys // self.block_size, np.int64)
        used = min(len(rows.table), len(table))
        table[:used] = rows.table[:used]
        return table
