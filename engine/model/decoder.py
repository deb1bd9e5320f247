"""The decoder: token ids and positions in, hidden states and logits out.

One for Llama, SmolLM2, Mistral, Qwen2 and Qwen3, by configuration. Knows nothing of sequences, blocks or
caches: keys and values go to an `Attention`, which keeps them and answers. A row's result depends on its own
token, its position and what attention says, and, bit for bit, on nothing else in the batch (`layers.Linear`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.layers import Rope
from engine.model.weights import LayerWeights, Weights


class Attention(Protocol):
    """The KV side of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v, attend causally within each sequence.

        q [n, n_heads, head_dim], k and v [n, n_kv_heads, head_dim], rope already applied, any strides; rows
        are the step's tokens, sequences one behind the other. Returns [n, n_heads · head_dim], contiguous.
        """
        ...


class Decoder:
    """A model ready to run; no state between calls. Positions lie below `max_context` (default: the model's)."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int | None = None) -> None:
        self.config = config
        self.weights = weights
        self._rope = Rope(config, max_context or config.max_position, weights.dtype)
        self._q = config.n_heads * config.head_dim
        self._kv = config.n_kv_heads * config.head_dim

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """ids, positions int64 [n] → hidden states [n, hidden_size] after the final norm, of the weights' dtype."""
        cos, sin = self._rope.at(positions)
        x = self.weights.embed.index_select(0, ids)
        for index, layer in enumerate(self.weights.layers):
            x = self._attend(index, layer, x, cos, sin, attention)
            h = layer.post_norm(x)
            h = layer.gate.silu(h).mul_(layer.up(h))
            x = layer.down(h).add_(x)
        return self.weights.final_norm(x)

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor,
                attention: Attention) -> Tensor:
        c = self.config
        qkv = layer.qkv(layer.input_norm(x))
        n = qkv.shape[0]
        qk = qkv.narrow(1, 0, self._q + self._kv).view(n, c.n_heads + c.n_kv_heads, c.head_dim)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        qk = self._rope.rotate(qk, cos, sin)
        v = qkv.narrow(1, self._q + self._kv, self._kv).view(n, c.n_kv_heads, c.head_dim)
        heads = attention.attend(index, qk.narrow(1, 0, c.n_heads), qk.narrow(1, c.n_heads, c.n_kv_heads), v)
        return layer.o(heads).add_(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden_size] → float32 [m, vocab_size]."""
        return self.weights.lm_head(hidden).float()
