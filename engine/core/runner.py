"""Runs a step on the device: rows of tokens in, logits out. It owns the device pool and its layout.

On a CPU the pool is `[layers, 2, kv_heads, slots, block_size, head_dim]`, so that attention reads one head's
blocks in whole pieces (kernels/paged_cpu.py). Everything outside sees a block as
`[layer][K|V][block_size][kv_heads][head_dim]`, through `read_block` and `write_block`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.layout import Layout, PagedStep, Rows, lay_out
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from kernels import paged_cpu as paged


class CpuRunner:
    """The decoder over a pool of `n_slots` blocks in RAM."""

    def __init__(self, decoder: Decoder, config: ModelConfig, *, n_slots: int, block_size: int,
                 dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.config = config
        self.n_slots = n_slots
        self.block_size = block_size
        self.dtype = dtype
        self.pool = torch.zeros(config.n_layers, 2, config.n_kv_heads, n_slots, block_size, config.head_dim,
                                dtype=dtype)
        self._scale = config.head_dim ** -0.5
        self._group = config.n_heads // config.n_kv_heads
        self._key_bytes = 2 * config.n_kv_heads * config.head_dim * dtype.itemsize
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
        layout = lay_out(batch, n_slots=self.n_slots, block_size=self.block_size, group=self._group,
                         dtype=self.dtype, key_bytes=self._key_bytes)
        step = PagedStep(self.pool, layout.slot_mapping, layout.parts, self._scale, self._scratch_for(layout))
        hidden = self.decoder.forward(layout.ids, layout.positions, step)
        if not layout.logit_rows:
            return torch.empty(0, self.config.vocab_size)
        return self.decoder.logits(hidden.index_select(0, torch.tensor(layout.logit_rows)))

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

    def _scratch_for(self, layout: Layout) -> Tensor:
        """Room for the largest gather of the step; kept, and grown when a step needs more."""
        largest = max((p.slots.numel() for p in layout.parts if p.first is None), default=0)
        need = paged.scratch_size(self.pool[0], largest)
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=self.dtype)
        return self._scratch
