"""The decoder: token ids and positions in, hidden states and logits out.

One for Llama, SmolLM2, Mistral, Qwen2 and Qwen3, by configuration. Knows nothing of sequences, blocks or
caches: keys and values go to an `Attention`, which keeps them and answers. A row's result depends on its own
token, its position and what attention says, and, bit for bit, on nothing else in the batch (`Weights.stable`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.layers import Rope, repeat_rows
from engine.model.weights import LayerWeights, Weights

#: oneDNN's bf16 and fp32 kernels take less time for 3 to 6 rows than for 1 or 2: a layer's linears, 576 µs for one
#: row, 633 for two, 505 for four (one Zen 4 core, torch 2.13).
_FEWEST_ROWS = 4


class Attention(Protocol):
    """The KV side of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v, attend causally within each sequence.

        q [n, n_heads, head_dim], k and v [n, n_kv_heads, head_dim], rope already applied, any strides; rows
        are the step's tokens, sequences one behind the other. Returns [n, n_heads · head_dim], contiguous.
        """
        ...


class Decoder:
    """A model ready to run; no state between calls. Positions lie below `max_context` (default: the model's).

    A step of fewer rows than `_FEWEST_ROWS`, or than the weights need to keep bits, repeats its rows up to there;
    attention sees only the real ones.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int | None = None) -> None:
        self.config = config
        self.weights = weights
        self._rope = Rope(config, max_context or config.max_position, weights.dtype)
        self._rows = max(_FEWEST_ROWS, weights.min_rows)
        self._q = config.n_heads * config.head_dim
        self._kv = config.n_kv_heads * config.head_dim

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """ids, positions int64 [n] → hidden states [n, hidden_size] after the final norm, of the weights' dtype."""
        n = ids.shape[0]
        cos, sin = self._rope.at(repeat_rows(positions, self._rows))
        x = self.weights.embed.index_select(0, repeat_rows(ids, self._rows))
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            heads = attention.attend(index, q[:n], k[:n], v[:n])
            x = layer.o(repeat_rows(heads, self._rows)).add_(x)
            h = layer.post_norm(x)
            h = layer.gate.silu(h).mul_(layer.up(h))
            x = layer.down(h).add_(x)
        return self.weights.final_norm(x)[:n]

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        qkv = layer.qkv(layer.input_norm(x))
        rows = qkv.shape[0]
        qk = qkv.narrow(1, 0, self._q + self._kv).view(rows, c.n_heads + c.n_kv_heads, c.head_dim)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        qk = self._rope.rotate(qk, cos, sin)
        v = qkv.narrow(1, self._q + self._kv, self._kv).view(rows, c.n_kv_heads, c.head_dim)
        return qk.narrow(1, 0, c.n_heads), qk.narrow(1, c.n_heads, c.n_kv_heads), v

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden_size] → float32 [m, vocab_size]."""
        m = hidden.shape[0]
        return self.weights.lm_head(repeat_rows(hidden, self.weights.head_min_rows))[:m].float()
