"""A model's weights, from safetensors or GGUF, fused and packed for the decoder.

    source (names as Hugging Face writes them) → checked shape → dtype → q, k and v in one → oneDNN's layout

A tensor is read, converted and packed before the next one is read: loading needs little more than it leaves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.gguf import GgufFile, TensorInfo, dequantise
from engine.model.layers import Linear, RmsNorm, RowStability, bf16_is_fast
from engine.model.library import ModelFiles
from engine.model.shards import find_shards

#: Elements dequantised at a time: the package's intermediate arrays then stay in the L2 cache
#: (all of SmolLM2, Zen 4, one thread: 0.30 s, against 1.3 s in its own 16-row pieces and 0.8 s in 1 M pieces).
CHUNK = 1 << 17
#: Below torch's grain size (32,768 elements), which it would split among threads.
_SERIAL = 1 << 14


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qk_norm` normalises q's and k's heads in one: weight [n_heads + n_kv_heads, head_dim]."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    o: Linear
    post_norm: RmsNorm
    gate: Linear
    up: Linear
    down: Linear

    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, self.gate, self.up, self.down]


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a decoder's weights.

    `min_rows` and `head_min_rows`: how many rows the layers and the head need for a row's bits not to depend on the
    batch, on this machine. `stable` is False where no number was found (nothing is padded then).
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm
    lm_head: Linear
    dtype: torch.dtype
    min_rows: int
    head_min_rows: int
    stable: bool


class Source(Protocol):
    """Where tensors come from. Names are Hugging Face's; the result is [rows, columns] or [n], of `dtype`."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


def default_dtype() -> torch.dtype:
    """What `--dtype auto` means: bf16 where the CPU computes in it, else fp32."""
    return torch.bfloat16 if bf16_is_fast() else torch.float32


def load_weights(files: ModelFiles, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read, convert and pack everything. Raises ModelError naming the tensor or file that is wrong."""
    source: Source = GgufSource(files.path, config) if files.kind == "gguf" else HfSource(files.path)
    with torch.inference_mode():
        return _Loader(source, config, dtype).load()


class _Loader:
    def __init__(self, source: Source, config: ModelConfig, dtype: torch.dtype) -> None:
        self._source, self._config, self._dtype = source, config, dtype

    def load(self) -> Weights:
        c = self._config
        embed = self._read("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        head = embed if c.tie_embeddings else self._read("lm_head.weight", c.vocab_size, c.hidden_size)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(c.n_layers))
        lm_head = Linear(head)
        stability = RowStability(self._dtype)
        rows = stability.of(layers[0].linears())
        head_rows = stability.of([lm_head])
        return Weights(
            embed=embed,
            layers=layers,
            final_norm=self._norm("model.norm.weight", c.hidden_size),
            lm_head=lm_head,
            dtype=self._dtype,
            min_rows=rows or 1,
            head_min_rows=head_rows or 1,
            stable=rows is not None and head_rows is not None,
        )

    def _layer(self, at: str) -> LayerWeights:
        c = self._config
        return LayerWeights(
            input_norm=self._norm(at + "input_layernorm.weight", c.hidden_size),
            qkv=self._qkv(at + "self_attn."),
            qk_norm=self._qk_norm(at + "self_attn.") if c.qk_norm else None,
            o=self._projection(at + "self_attn.o_proj", c.hidden_size, c.n_heads * c.head_dim, c.o_bias),
            post_norm=self._norm(at + "post_attention_layernorm.weight", c.hidden_size),
            gate=self._projection(at + "mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            up=self._projection(at + "mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            down=self._projection(at + "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        )

    def _qkv(self, at: str) -> Linear:
        c = self._config
        sizes = {"q_proj": c.n_heads * c.head_dim, "k_proj": c.n_kv_heads * c.head_dim,
                 "v_proj": c.n_kv_heads * c.head_dim}
        weight = torch.cat([self._read(f"{at}{n}.weight", rows, c.hidden_size) for n, rows in sizes.items()])
        bias = None
        if c.qkv_bias:
            bias = torch.cat([self._read(f"{at}{name}.bias", rows) for name, rows in sizes.items()])
        return Linear(weight, bias)

    def _qk_norm(self, at: str) -> RmsNorm:
        c = self._config
        q, k = (self._read(f"{at}{name}_norm.weight", c.head_dim) for name in ("q", "k"))
        return RmsNorm(torch.cat((q.expand(c.n_heads, -1), k.expand(c.n_kv_heads, -1))), c.norm_eps)

    def _projection(self, name: str, rows: int, columns: int, has_bias: bool) -> Linear:
        bias = self._read(name + ".bias", rows) if has_bias else None
        return Linear(self._read(name + ".weight", rows, columns), bias)

    def _norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self._read(name, size), self._config.norm_eps)

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._source.read(name, shape, self._dtype)


def _check_shape(where: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ModelError(f"{where}: tensor {name!r} has shape {list(found)}, and by the model's configuration it "
                         f"is {list(expected)}. Weights and configuration are not of the same model.")


class HfSource:
    """A folder of safetensors files, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = find_shards(folder)
        self._open: dict[Path, Any] = {}

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (path := self._files.get(name)) is None:
            raise ModelError(f"{self._folder} has no tensor {name!r} in its {len(set(self._files.values()))} "
                             "weight file(s). It is not the model that its config.json describes.")
        if path not in self._open:
            self._open[path] = _opened(path)
        tensor: Tensor = self._open[path].get_tensor(name)
        _check_shape(path, name, tuple(tensor.shape), shape)
        # A copy even where the dtype is right: what is served must not change, or vanish, with the file.
        return tensor.to(dtype, copy=True)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:    # shapes, types and places that don't agree
        raise ModelError(f"{path} has a broken safetensors header: {error}. Download it again.") from None


#: Hugging Face's names → GGUF's (llama.cpp, gguf-py/gguf/tensor_mapping.py).
_GGUF_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """GGUF's name for Hugging Face's `name`."""
    if found := _LAYER_NAME.fullmatch(name):
        return f"blk.{found[1]}.{_GGUF_LAYER[found[2]]}.{found[3]}"
    return _GGUF_TOP[name]


class GgufSource:
    """A GGUF file: dequantised in pieces; llama's q and k brought back to Hugging Face's order of rows."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GgufFile(path)
        self._heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
        self._interleaved = config.architecture == "llama"

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        info = self._file.tensor(gguf_name(name))
        _check_shape(self._file.path, info.name, info.shape, shape)
        tensor = self._convert(info, dtype)
        projection = name.rsplit(".", 2)[-2]
        if self._interleaved and projection in self._heads:
            tensor = to_half_rotation(tensor, self._heads[projection])
        return tensor

    def _convert(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """Through fp32 to dtype, rounding to nearest even."""
        raw = self._file.raw(info.name).reshape(-1)
        out = torch.empty(info.shape, dtype=dtype)
        flat = out.view(-1)
        per_byte = len(flat) / len(raw)
        step = max(1, len(raw) * CHUNK // len(flat)) if len(flat) > CHUNK else len(raw)
        for at in range(0, len(raw), step):
            values = dequantise(raw[at:at + step].reshape(1, -1), info.type).reshape(-1)
            _store(values, flat[round(at * per_byte):])
        return out


def _store(values: npt.NDArray[np.float32], out: Tensor) -> None:
    """Copy and round, in pieces that torch does not hand to a second thread: waking it a thousand times, on a
    machine that is busy with something else, took seconds."""
    source = torch.from_numpy(values if values.flags.writeable else values.copy())
    for at in range(0, len(source), _SERIAL):
        piece = source[at:at + _SERIAL]
        out[at:at + len(piece)].copy_(piece)


def to_half_rotation(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of q's and k's rows: for its rope, rows i and half + i lie at 2i and 2i + 1.

    weight [heads · head_dim, …]; the inverse is `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
