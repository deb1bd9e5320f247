"""What the model tests compare with: full causal attention, a row-wise stand-in, Hugging Face's own models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import ModelConfig, load_config
from engine.model.decoder import Decoder
from engine.model.library import ModelFiles
from engine.model.weights import load_weights


class CausalAttention:
    """Keeps all keys and values of each sequence and attends with torch's SDPA. `rows` are a step's, a sequence."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [self._one(layer, sequence, *new) for sequence, new in enumerate(
            zip(q.split(self.rows), k.split(self.rows), v.split(self.rows), strict=True))]
        return torch.cat(parts).reshape(q.shape[0], -1)

    def _one(self, layer: int, sequence: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (old := self._kept.get((layer, sequence))) is not None:
            k, v = torch.cat((old[0], k)), torch.cat((old[1], v))
        self._kept[layer, sequence] = (k, v)
        group = q.shape[1] // k.shape[1]
        new, total = q.shape[0], k.shape[0]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        heads = [x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask)[0].transpose(0, 1)


class RowwiseAttention:
    """Not attention: a mix of the row's own q, k and v, so that what is compared is everything around it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        mixed = q * 0.25 + k.repeat_interleave(group, 1) * 0.5 + v.repeat_interleave(group, 1)
        return mixed.reshape(q.shape[0], -1)


def load(files: ModelFiles, dtype: torch.dtype = torch.float32) -> Decoder:
    config = load_config(files)
    return Decoder(config, load_weights(files, config, dtype))


def all_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """[n, vocab] of a prompt that begins at position 0."""
    n = len(ids)
    return decoder.logits(decoder.forward(torch.tensor(ids), torch.arange(n), CausalAttention([n])))


def greedy(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    attention = CausalAttention([len(prompt)])
    hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), attention)
    found = [int(decoder.logits(hidden[-1:]).argmax())]
    attention.rows = [1]
    while len(found) < count:
        at = torch.tensor([len(prompt) + len(found) - 1])
        hidden = decoder.forward(torch.tensor(found[-1:]), at, attention)
        found.append(int(decoder.logits(hidden).argmax()))
    return found


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Transformers, one call a token on its own cache; no generation config takes part."""
    found: list[int] = []
    ids, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        while len(found) < count:
            out = model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([found[-1:]])
    return found


def save_random(model_class: Any, config: Any, folder: Path, seed: int = 0) -> tuple[Any, ModelFiles]:
    """A tiny random model as Transformers saves it. Norms and biases are random too: at their start values of one
    and zero a forgotten one would not show."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return model, ModelFiles(folder.name, folder, "hf")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_gguf(path: Path, architecture: str, config: ModelConfig, tensors: dict[str, np.ndarray],
               more: Callable[[Any], None] = lambda writer: None) -> Path:
    """A GGUF file of float32 tensors, with the header keys that llama.cpp's converter writes."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    more(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
