"""What a model is made of, read from a Hugging Face folder or a GGUF header. No torch.

Knows the architectures by name and refuses every other one, and every variation that the decoder does not
compute (other activations, other rope types, mixtures of experts, quantised safetensors): a model that loads
is computed right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError
from engine.model.gguf import GgufFile
from engine.model.library import ModelFiles

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: llama.cpp writes Mistral (and SmolLM2) as "llama".
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: What reading a value of another type, or an impossible one, raises.
WRONG_VALUE = (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
#: Rope's positions are float32, which holds whole numbers up to here.
MAX_POSITION = 2**24
#: How much of a file's value an error repeats.
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope's frequencies differ from the plain ones.

    linear: all divided by `factor`. llama3: those of wavelengths beyond original_max_position / low_freq_factor
    divided by `factor`, those below original_max_position / high_freq_factor kept, a ramp between (Llama 3.1's
    `apply_scaling`). factors: each frequency divided by its own number, which is how a GGUF carries llama3.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. `sliding_window` is None where every token sees all before it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def kv_values_per_token(self) -> int:
        """How many numbers of K and V a token keeps, all layers (times the dtype's size: bytes)."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


def load_config(files: ModelFiles) -> ModelConfig:
    """The model's configuration; ModelError names what is missing, unknown or unsupported."""
    if files.kind == "gguf":
        config = _from_gguf(GgufFile(files.path))
    else:
        config = _from_folder(files.path)
    _check_shape(config, files.path)
    return config


def check_supported(config: ModelConfig, max_context: int) -> None:
    """Refuse a context in which a sliding window would hide tokens: attention here always sees them all."""
    if config.sliding_window is not None and max_context > config.sliding_window:
        raise ModelError(
            f"{config.architecture} attends to a sliding window of {config.sliding_window:,} tokens, which is "
            f"not supported beyond it, and the context is {max_context:,}. "
            f"Start with `--max-context {config.sliding_window}`.")


def _check_shape(config: ModelConfig, path: Path) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads",
                 "head_dim", "max_position"):
        if getattr(config, name) <= 0:
            raise ModelError(f"{path}: {name} is {getattr(config, name)}; it must be positive.")
    if config.max_position > MAX_POSITION:
        raise ModelError(f"{path}: a context of {config.max_position:,} tokens; {MAX_POSITION:,} is the most.")
    scaling = config.rope_scaling
    for name, value in {"norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
                        "rope scaling's factor": scaling.factor if scaling else 1.0}.items():
        if not 0 < value < math.inf:
            raise ModelError(f"{path}: {name} is {value}; it must be positive.")
    if config.n_heads % config.n_kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{path}: {config.n_heads} heads, {config.n_kv_heads} KV heads of {config.head_dim} values: heads must "
            "be a multiple of KV heads, and a head's size even.")


# ---- Hugging Face ----------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a complete model folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}. Download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not an object. Download it again.")
    return value


def _from_folder(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    raw = read_json(path)
    architecture = _hf_architecture(raw, path)
    try:
        _refuse_hf(raw, path)
        return _hf_config(architecture, raw, folder)
    except KeyError as error:
        raise ModelError(f"{path} has no {error.args[0]!r}, which {architecture} needs.") from None
    except WRONG_VALUE as error:
        raise ModelError(f"{path} has a value of the wrong type: {error}.") from None


def _hf_architecture(raw: Mapping[str, Any], path: Path) -> str:
    names = raw.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    known = [name for name in names if name in HF_ARCHITECTURES]
    if not known:
        named = (", ".join(map(str, names)) or repr(raw.get("model_type")))[:SHOWN_CHARS]
        raise ModelError(f"{path}: unknown architecture {named}. Known: {', '.join(HF_ARCHITECTURES)}.")
    return str(known[0])


def _refuse_hf(raw: Mapping[str, Any], path: Path) -> None:
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act {activation!r} is not supported, only 'silu'.")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path}: weights quantised with {method!r} are not supported. Use the plain model, or a GGUF.")
    if (part := raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor {part} is not supported, only 1.0.")


def _hf_config(architecture: str, raw: Mapping[str, Any], folder: Path) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    theta, scaling = _hf_rope(raw, folder / "config.json")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        n_layers=int(raw["num_hidden_layers"]),
        n_heads=heads,
        n_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        max_position=int(raw["max_position_embeddings"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_hf_window(architecture, raw),
        eos_ids=_hf_eos(raw, folder),
        bos_id=_first_id(raw.get("bos_token_id")),
    )


def _hf_window(architecture: str, raw: Mapping[str, Any]) -> int | None:
    """Llama has none; Qwen uses the one it writes only where `use_sliding_window` says so."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window")
    return int(window) if window else None


def _hf_rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Transformers 5 writes `rope_parameters`, theta inside; before, it was `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: rope_parameters (or rope_scaling) is {str(rope)[:SHOWN_CHARS]}, not an object.")
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3", float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]))
    raise ModelError(f"{path}: rope type {kind!r} is not supported; default, linear and llama3 are.")


def _hf_eos(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Both files' ids: chat models end turns with one that often stands only in generation_config.json."""
    found = _ids(raw.get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.exists():
        found += _ids(read_json(generation).get("eos_token_id"))
    return tuple(dict.fromkeys(found))


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _first_id(value: Any) -> int | None:
    return next(iter(_ids(value)), None)


# ---- GGUF ------------------------------------------------------------------------------------------


def _from_gguf(file: GgufFile) -> ModelConfig:
    architecture = str(file.metadata.get("general.architecture"))[:SHOWN_CHARS]
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: unknown architecture {architecture!r}. "
            f"Known in GGUF: {', '.join(GGUF_ARCHITECTURES)}.")
    try:
        return _gguf_config(architecture, file)
    except KeyError as error:
        raise ModelError(f"{file.path} has no {error.args[0]!r}, which {architecture} needs.") from None
    except WRONG_VALUE as error:
        raise ModelError(f"{file.path} has a value of the wrong type: {error}.") from None


def _gguf_config(architecture: str, file: GgufFile) -> ModelConfig:
    def get(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise KeyError(f"{architecture}.{name}")
        return value

    if int(get("expert_count", 0)) > 0:
        raise ModelError(f"{file.path} is a mixture of {get('expert_count')} experts: not supported.")
    heads = int(get("attention.head_count"))
    hidden = int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if (rotated := int(get("rope.dimension_count", head_dim))) != head_dim:
        raise ModelError(f"{file.path}: rope over {rotated} of {head_dim} values of a head is not supported.")
    tensors = file.tensors
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensor("token_embd.weight").shape[0],
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        n_layers=int(get("block_count")),
        n_heads=heads,
        n_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position=int(get("context_length")),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        rope_scaling=_gguf_rope(file, get),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=int(get("attention.sliding_window", 0)) or None,
        eos_ids=_gguf_eos(file),
        bos_id=_first_id(file.metadata.get("tokenizer.ggml.bos_token_id")),
    )


def _gguf_rope(file: GgufFile, get: Any) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        return RopeScaling("factors", factors=tuple(file.dequantise("rope_freqs.weight").ravel().tolist()))
    kind = get("rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", factor=float(get("rope.scaling.factor")))
    if kind == "none":
        return None
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; none, linear and llama3 are.")


def _gguf_eos(file: GgufFile) -> tuple[int, ...]:
    """End of text, of turn and of message: chat models end their answers with any of them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [i for name in names for i in _ids(file.metadata.get(f"tokenizer.ggml.{name}"))]
    return tuple(dict.fromkeys(found))
