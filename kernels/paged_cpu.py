"""Paged attention on a CPU, in torch: the rows of a step against KV blocks that lie in a pool.

A layer's pool is `[2, kv_heads, slots, block_size, head_dim]` (K, then V): head-major, so that a block of one
head is one contiguous piece (2 KB at 16 x 64 x bf16) and a gather by block costs little more than reading in
place. Measured on two Zen 4 cores (2026-11-30, `python -m bench.kv_layout`): see docs/benchmarks.md.

**Same bits.** Every row, prefill or decode, alone or in a batch, goes through torch's flash kernel for CPUs
against keys padded (by mask) to a multiple of WINDOW. That kernel reduces over keys in windows of 512 from key
0 on, so a row's result depends on its own keys alone: not on the chunk it came in, nor on its neighbours. One
thing more is needed: it takes query rows in blocks of 32 (64, 256 for many rows), and a last block of 1 to 3
rows is multiplied in another order, in bf16 and in fp32 (seen with sums that cancel: up to every element
differs; blocks of 4 to 256 rows agree). So such a rest is padded to 4 rows. And a call with a single block of
rows is no parallel region, so the BLAS inside it uses threads of its own and sums otherwise: it is doubled.

Padding reads slots that belong to others; they are masked, and finite, as the pool starts as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 512
MIN_REST = 4
QUERY_BLOCK = 32

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def padded_length(n_keys: int) -> int:
    """n_keys rounded up to a multiple of WINDOW."""
    return -(-n_keys // WINDOW) * WINDOW


def missing_rows(n: int) -> int:
    """How many rows to add to n, so that the last block of query rows is one whose bits agree."""
    rest = n % QUERY_BLOCK
    return MIN_REST - rest if 0 < rest < MIN_REST else 0


def kv_write(pool: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store n tokens' K and V.

    pool: [2, kv_heads, slots, block_size, head_dim] of one layer; k, v: [n, kv_heads, head_dim];
    slot_mapping: [n] int64, slot * block_size + offset.
    """
    _, heads, slots, size, dim = pool.shape
    flat = pool.view(2, heads, slots * size, dim)
    flat[0].index_copy_(1, slot_mapping, k.transpose(0, 1))
    flat[1].index_copy_(1, slot_mapping, v.transpose(0, 1))


def gather(pool: Tensor, slots: Tensor, sequences: int, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of `sequences` block tables of equal (padded) length laid end to end in `slots` [m] int64.

    scratch: flat, in the pool's dtype, at least `scratch_size(pool, m)` long; what is returned lies in it, as
    fresh memory for each layer would cost as much as the copy. Returns two tensors
    [sequences, kv_heads, m / sequences * block_size, head_dim].
    """
    _, heads, n_slots, size, dim = pool.shape
    m = slots.numel()
    picked = scratch[:2 * heads * m * size * dim].view(2, heads, m, size * dim)
    torch.index_select(pool.view(2, heads, n_slots, size * dim), 2, slots, out=picked)
    both = picked.view(2, heads, sequences, m // sequences * size, dim).transpose(1, 2)
    return both[0], both[1]


def adjacent(pool: Tensor, first: int, n_blocks: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence whose n_blocks slots follow each other from `first`: views, nothing is copied.

    Returns two tensors [1, kv_heads, n_blocks * block_size, head_dim].
    """
    _, heads, _, size, dim = pool.shape
    both = pool[:, :, first:first + n_blocks].view(2, 1, heads, n_blocks * size, dim)
    return both[0], both[1]


def scratch_size(pool: Tensor, n_blocks: int) -> int:
    """Elements that `gather` of n_blocks needs. pool: one layer's."""
    kv, heads, _, size, dim = pool.shape
    return kv * heads * n_blocks * size * dim


def decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One query row a sequence.

    q: [b, heads, head_dim]; k, v: [b, kv_heads, keys, head_dim], keys a multiple of WINDOW;
    mask: [b, 1, 1, keys] additive, in q's dtype. Returns [b, heads * head_dim].
    The query heads that share a KV head become rows of one product.
    """
    b, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = q.reshape(b, kv_heads, group, dim)
    out = _attend(rows, k, v, mask, scale)
    return out[:, :, :group].reshape(b, heads * dim)


def extend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """n consecutive rows of one sequence over its whole prefix and themselves.

    q: [n, heads, head_dim]; k, v: [kv_heads, keys, head_dim], keys a multiple of WINDOW;
    mask: [n * group, keys] additive (`extend_mask`). Returns [n, heads * head_dim].
    """
    n, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    rows = q.view(n, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(1, kv_heads, n * group, dim)
    out = _attend(rows, k[None], v[None], mask[None, None], scale)
    return out[0, :, : n * group].reshape(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)


def _attend(rows: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The flash kernel on [b, heads, n, head_dim], with what it needs so that bits agree; the first n rows count.

    mask: [b | 1, 1, n | 1, keys].
    """
    b, heads, n, _ = rows.shape
    short = missing_rows(n)
    if short:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, short))
        if mask.shape[2] > 1:
            mask = torch.nn.functional.pad(mask, (0, 0, 0, short))
    if b * heads == 1 and n <= QUERY_BLOCK:
        rows, k, v, mask = (t.expand(2, *t.shape[1:]) for t in (rows, k, v, mask))
    out: Tensor = _flash(rows, k, v, attn_mask=mask, scale=scale)[0]
    return out[:b]


def extend_mask(start: int, n: int, keys: int, group: int, dtype: torch.dtype) -> Tensor:
    """[n * group, keys]: row i of a chunk that begins at `start` sees keys 0 .. start + i."""
    mask = torch.full((n, keys), float("-inf"), dtype=dtype)
    mask.triu_(start + 1)
    return mask.repeat_interleave(group, 0) if group > 1 else mask


def decode_mask(lengths: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """[b, 1, 1, keys]: sequence i sees its first lengths[i] keys. lengths: [b] int64."""
    hidden = torch.arange(keys)[None, :] >= lengths[:, None]
    return torch.zeros(len(lengths), keys, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None, :]
