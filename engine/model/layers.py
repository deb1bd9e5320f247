"""The decoder's pieces: linear, RMS norm, rope. Each row's result depends on that row alone, bit for bit.

Knows shapes and number formats; does not know models, sequences or caches. All tensors are [rows, …].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import ModelConfig, RopeScaling

#: oneDNN lays a weight out for an expected batch; every hint from 8 to 512 gave the same speeds and the same
#: bits (2 × Zen 4, torch 2.13), and 1 a layout that is slow and of other bits for larger batches.
_BATCH_HINT = 64
#: Batches tried for other bits, and how far padding may go. Seen: packed, M = 1 splits a long reduction
#: (1,536 and more; not 576) over K; unpacked fp32 differs at 1, 2, 3, 5, 6, 7, 9, 10, 11.
_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17)
_PADDINGS = (1, 2, 4, 8, 16)
_LARGE_WEIGHT = 1 << 24


class Linear:
    """y = x Wᵀ + b over [n, in_features] → [n, out_features].

    The weight is kept in oneDNN's own layout where that exists: for 1 to 16 rows that halves the time of
    `F.linear` (one Zen 4 core, bf16, 576 → 1,536, one row: 204 → 100 µs). A row's bits do not depend on the batch
    from some number of rows on, which is the caller's to keep (`RowStability`, `repeat_rows`).
    """

    __slots__ = ("_bias", "_packed_linear", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        packed = pack(weight)
        self._packed_linear: Any = None if packed is None else torch.ops.mkldnn._linear_pointwise.default
        self._weight = weight if packed is None else packed
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed_linear is not None:
            packed: Tensor = self._packed_linear(x, self._weight, self._bias, "none", [], "")
            return packed
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        """silu(self(x)), in one pass where the weight is packed."""
        if self._packed_linear is not None:
            packed: Tensor = self._packed_linear(x, self._weight, self._bias, "swish", [], "")
            return packed
        return F.silu(F.linear(x, self._weight, self._bias), inplace=True)


def pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout (a copy), or None where this torch or this CPU has none for it."""
    if not _has_onednn() or weight.device.type != "cpu":
        return None
    if weight.dtype == torch.bfloat16 and not bf16_is_fast():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
    except (RuntimeError, AttributeError):  # a oneDNN that lacks this form: the plain one is as right
        return None
    return packed


def bf16_is_fast() -> bool:
    """Whether this CPU has bf16 matmuls; without them bf16 is emulated, and slower than fp32."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def repeat_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, …] with its rows repeated up to `rows`; x itself if it has as many."""
    n = x.shape[0]
    return x if n >= rows else torch.cat([x] * -(-rows // n))[:rows]


class RowStability:
    """How many rows a linear needs before a row's bits stop depending on the batch, on this CPU.

    Kernels are chosen by shape, ISA and threads, so the answer is measured, once per shape (some ms), on numbers
    that make it visible: each row's sum holds every product twice with opposite signs, in random order, so the
    exact result is 0 and what is left is the rounding of one order of summation.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[tuple[int, int], int | None] = {}

    def of(self, linears: Iterable[Linear]) -> int | None:
        """The smallest batch that is enough for each of them; None if there is none."""
        found = [self.min_rows(linear.out_features, linear.in_features) for linear in linears]
        return None if None in found else max(rows for rows in found if rows is not None)

    def min_rows(self, out_features: int, in_features: int) -> int | None:
        """The smallest sufficient batch among 1, 2, 4, 8, 16 for one shape; None if even 16 rows are not enough."""
        key = (out_features, in_features)
        if key not in self._known:
            self._known[key] = self._measure(*key)
        return self._known[key]

    def _measure(self, out_features: int, in_features: int) -> int | None:
        large = out_features * in_features > _LARGE_WEIGHT
        x, weight = cancelling(out_features, in_features, 48 if large else 512, self._dtype)
        apply = Linear(weight)
        expected = apply(x)
        bad = [n for n in _PROBED_ROWS if not torch.equal(apply(x[n:n + n]), expected[n:n + n])]
        return next((n for n in _PADDINGS if n > max(bad, default=0)), None)


def cancelling(out_features: int, in_features: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, in] and W [out, in] with x Wᵀ = 0 in exact numbers, and not in floating ones (RowStability)."""
    random = torch.Generator().manual_seed(0)
    half = in_features // 2
    order = torch.randperm(2 * half, generator=random)
    x = torch.randn(rows, half, generator=random)
    w = torch.randn(min(out_features, 64), half, generator=random)
    odd = (0, in_features - 2 * half)
    x = F.pad(torch.cat((x, x), 1)[:, order], odd).to(dtype)
    w = F.pad(torch.cat((w, -w), 1)[:, order], odd).to(dtype)
    return x, w.repeat(-(-out_features // w.shape[0]), 1)[:out_features].contiguous()


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; fp32 inside, rounded as Transformers does.

    Seven small ops; `F.rms_norm` is as many and took 12.6 µs for one bf16 row of 576, this 9.6 (Zen 4).
    """

    __slots__ = ("_eps", "_inverse_size", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = torch.full((1, 1), eps, dtype=torch.float32)
        self._inverse_size = 1.0 / weight.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._inverse_size).rsqrt_()
        return torch.mul(wide, scale).to(x.dtype).mul_(self._weight)


class Rope:
    """Rotary position embedding, half-rotation convention (Hugging Face's), cos and sin from a table.

    A table, and not cos() of a step's positions: a vectorised cos need not have the bits of its scalar tail.
    """

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._table = table.to(dtype)  # [length, cos | signed sin, head_dim]
        self._half = config.head_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [n, 1, head_dim] for a step; positions must lie inside the table."""
        rows = self._table.index_select(0, positions)
        return rows[:, :1], rows[:, 1:]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [n, heads, head_dim], rotated: x · cos + swap(x) · (-sin | sin)."""
        return torch.mul(x, cos).addcmul_(x.roll(self._half, -1), sin)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32: theta^(-2i/d), scaled as the config says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta ** exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's `apply_scaling` (meta-llama/llama-models, models/llama3/model.py)."""
    old = scaling.original_max_position
    wavelength = 2 * math.pi / plain
    ramp = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - ramp) * plain / scaling.factor + ramp * plain
    scaled = torch.where(wavelength > old / scaling.low_freq_factor, plain / scaling.factor, between)
    return torch.where(wavelength < old / scaling.high_freq_factor, plain, scaled)
