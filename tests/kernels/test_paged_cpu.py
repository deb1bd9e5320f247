"""Paged attention on a CPU: right against a plain reference, and the same bits in any company."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import paged_cpu as paged

SHAPES = [(9, 3, 64), (4, 2, 32), (2, 2, 64), (8, 8, 128), (7, 1, 64), (4, 4, 96)]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """float64, one row at a time."""
    n, heads, dim = q.shape
    group = heads // k.shape[0]
    out = torch.empty(n, heads, dim, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            keys, values = k[h // group, :start + i + 1].double(), v[h // group, :start + i + 1].double()
            out[i, h] = ((keys @ q[i, h].double()) / math.sqrt(dim)).softmax(0) @ values
    return out.view(n, heads * dim)


def pool_of(k: torch.Tensor, v: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in a pool with its slots out of order, and the block table; unused slots hold large numbers."""
    heads, keys, dim = k.shape
    need = -(-keys // block)
    table = torch.randperm(need + 5, generator=torch.Generator().manual_seed(3))[:need]
    pool = torch.full((2, heads, need + 5, block, dim), 1e4, dtype=k.dtype)
    at = torch.arange(keys)
    paged.kv_write(pool, k.transpose(0, 1), v.transpose(0, 1), table[at // block] * block + at % block)
    return pool, table


def padded(table: torch.Tensor, keys: int, block: int) -> torch.Tensor:
    return torch.cat((table, torch.zeros(keys // block - len(table), dtype=torch.int64)))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_and_decode_agree_with_a_plain_reference(heads: int, kv_heads: int, dim: int,
                                                        dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for start, n in ((0, 1), (0, 5), (507, 9), (513, 1), (31, 33)):
        keys = start + n
        k, v = torch.randn(kv_heads, keys, dim).to(dtype), torch.randn(kv_heads, keys, dim).to(dtype)
        q = torch.randn(n, heads, dim).to(dtype)
        pool, table = pool_of(k, v, 16)
        length = paged.padded_length(keys)
        slots = padded(table, length, 16)
        scratch = torch.full((paged.scratch_size(pool, len(slots)),), float("nan"), dtype=dtype)
        gk, gv = paged.gather(pool, slots, 1, scratch)
        mask = paged.extend_mask(start, n, length, heads // kv_heads, dtype)
        out = paged.extend(q, gk[0], gv[0], mask, dim ** -0.5)
        expected = reference(q, k, v, start)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert (out.double() - expected).abs().max() <= tolerance
        last = paged.decode(q[-1:], gk, gv, paged.decode_mask(torch.tensor([keys]), length, dtype), dim ** -0.5)
        assert torch.equal(last[0], out[-1])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_chunk(heads: int, kv_heads: int, dim: int,
                                                        dtype: torch.dtype) -> None:
    """Values that nearly cancel: another order of summation would show in most elements."""
    generator = torch.Generator().manual_seed(2)
    keys, n, start = 1024, 260, 600
    half = torch.randn(2, kv_heads, keys // 2, dim, generator=generator)
    order = torch.randperm(keys, generator=generator)
    k = torch.cat((half[0], half[0] * 1.001), 1)[:, order].to(dtype)
    v = torch.cat((half[1], -half[1]), 1)[:, order].to(dtype)
    q = torch.randn(n, heads, dim, generator=generator).to(dtype)
    group, scale = heads // kv_heads, dim ** -0.5

    def rows(first: int, m: int) -> torch.Tensor:
        mask = paged.extend_mask(start + first, m, keys, group, dtype)
        return paged.extend(q[first:first + m], k, v, mask, scale)

    whole = rows(0, n)
    for m in (*range(1, 36), 63, 64, 65, 66, 67, 97, 129, 193):
        for first in (0, 1, n - m):
            assert torch.equal(rows(first, m), whole[first:first + m]), f"{m} rows from {first}"
    batch = torch.tensor([0, 3, 100, 259])
    both = (k.expand(4, *k.shape), v.expand(4, *v.shape))
    alone = paged.decode(q[batch], *both, paged.decode_mask(start + batch + 1, keys, dtype), scale)
    assert torch.equal(alone, whole[batch])


def test_padding_has_no_say() -> None:
    """Keys behind a sequence's end, whatever they are, and a whole window of them, change no bit."""
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 32), torch.randn(1, 2, 512, 32), torch.randn(1, 2, 512, 32)
    short = paged.decode(q, k, v, paged.decode_mask(torch.tensor([300]), 512, q.dtype), 0.2)
    more = torch.cat((k, k * 1e3), 2), torch.cat((v, v * 1e3), 2)
    more[0][:, :, 300:] += 5
    long = paged.decode(q, *more, paged.decode_mask(torch.tensor([300]), 1024, q.dtype), 0.2)
    assert torch.equal(short, long)
