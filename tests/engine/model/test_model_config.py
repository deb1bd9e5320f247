from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_reference import write_gguf

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling, check_supported, load_config
from engine.model.gguf import GgufFile
from engine.model.library import ModelFiles

LLAMA_3_2_1B = {  # meta-llama/Llama-3.2-1B-Instruct, config.json
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256}
QWEN2_5_7B = {  # Qwen/Qwen2.5-7B-Instruct
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 152064}
QWEN3_8B = {  # Qwen/Qwen3-8B
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}
MISTRAL_7B_V01 = {  # mistralai/Mistral-7B-v0.1
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000}


def folder(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelFiles:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelFiles("m", tmp_path, "hf")


def test_llama_3_2(tmp_path: Path) -> None:
    assert load_config(folder(tmp_path, LLAMA_3_2_1B)) == ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=2048, intermediate_size=8192, n_layers=16,
        n_heads=32, n_kv_heads=8, head_dim=64, max_position=131072, norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), tie_embeddings=True,
        eos_ids=(128001, 128008, 128009), bos_id=128000)


def test_qwen2_has_qkv_biases_and_no_window_unless_it_says_so(tmp_path: Path) -> None:
    config = load_config(folder(tmp_path, QWEN2_5_7B, {"eos_token_id": [151645, 151643]}))
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim) == (True, False, False, 128)
    assert config.sliding_window is None
    assert config.eos_ids == (151645, 151643)


def test_qwen3_has_norms_of_q_and_k_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    config = load_config(folder(tmp_path, {**QWEN3_8B, "head_dim": 64}))
    assert (config.qk_norm, config.qkv_bias, config.head_dim, config.n_heads) == (True, False, 64, 32)


def test_a_sliding_window_is_refused_only_where_it_would_hide_tokens(tmp_path: Path) -> None:
    config = load_config(folder(tmp_path, MISTRAL_7B_V01))
    assert config.sliding_window == 4096
    check_supported(config, 4096)
    with pytest.raises(ModelError, match=r"4,096 tokens.*8,192.*--max-context 4096"):
        check_supported(config, 8192)


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    raw = {**QWEN3_8B, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    del raw["rope_theta"]
    config = load_config(folder(tmp_path, raw))
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling("linear", 2.0))


@pytest.mark.parametrize(("change", "named"), [
    ({"architectures": ["MambaForCausalLM"]}, "unknown architecture MambaForCausalLM.*LlamaForCausalLM"),
    ({"architectures": None, "model_type": "gpt2"}, "unknown architecture 'gpt2'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"num_hidden_layers": "many"}, "wrong type.*'many'"),
    ({"num_key_value_heads": 5}, "32 heads, 5 KV heads"),
    ({"vocab_size": 0}, "vocab_size is 0"),
])
def test_what_the_decoder_does_not_compute_is_refused_by_name(
        change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        load_config(folder(tmp_path, {**LLAMA_3_2_1B, **change}))


def test_a_missing_key_and_a_broken_file_are_named(tmp_path: Path) -> None:
    raw = {key: value for key, value in LLAMA_3_2_1B.items() if key != "hidden_size"}
    with pytest.raises(ModelError, match="no 'hidden_size'"):
        load_config(folder(tmp_path, raw))
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load_config(ModelFiles("m", tmp_path, "hf"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not an object"):
        load_config(ModelFiles("m", tmp_path, "hf"))


# ---- GGUF -------------------------------------------------------------------------------------------------

SHAPE = ModelConfig(architecture="llama", vocab_size=32, hidden_size=16, intermediate_size=24, n_layers=1, n_heads=2,
                    n_kv_heads=1, head_dim=8, max_position=64, norm_eps=1e-5, rope_theta=1e4)
EMBED = {"token_embd.weight": np.zeros((32, 16), np.float32)}


def from_gguf(tmp_path: Path, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None,
              more: Any = lambda writer: None) -> ModelConfig:
    path = write_gguf(tmp_path / "m.gguf", architecture, SHAPE, {**EMBED, **(tensors or {})}, more)
    return load_config(ModelFiles("m", path, "gguf"))


def test_smollm2(smollm2_files: ModelFiles) -> None:
    config = load_config(smollm2_files)
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.max_position, config.rope_theta, config.tie_embeddings) == (8192, 1e5, True)
    assert config.eos_ids == (2,)


def test_a_gguf_tells_by_its_tensors_what_its_header_does_not(tmp_path: Path) -> None:
    ones = np.ones(8, np.float32)
    config = from_gguf(tmp_path, "qwen3", {
        "output.weight": np.zeros((32, 16), np.float32), "blk.0.attn_q.bias": np.zeros(16, np.float32),
        "blk.0.attn_q_norm.weight": ones})
    assert (config.tie_embeddings, config.qkv_bias, config.qk_norm, config.o_bias) == (False, True, True, False)
    assert config.head_dim == 8


def test_a_gguf_ends_at_end_of_text_turn_and_message(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)
        writer.add_bos_token_id(1)

    config = from_gguf(tmp_path, more=more)
    assert (config.eos_ids, config.bos_id) == ((7, 9), 1)


def test_a_gguf_carries_rope_factors_as_a_tensor_or_linear_scaling_as_a_number(tmp_path: Path) -> None:
    factors = np.float32([1, 1, 4, 8])
    assert from_gguf(tmp_path, tensors={"rope_freqs.weight": factors}).rope_scaling == RopeScaling(
        "factors", factors=(1.0, 1.0, 4.0, 8.0))

    def linear(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    assert from_gguf(tmp_path, more=linear).rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(("architecture", "more", "named"), [
    ("gemma3", lambda w: None, "unknown architecture 'gemma3'.*llama, qwen2, qwen3"),
    ("llama", lambda w: w.add_expert_count(8), "8 experts"),
    ("llama", lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "rope scaling 'yarn'"),
    ("llama", lambda w: w.add_rope_dimension_count(4), "4 of 8"),
])
def test_a_gguf_that_the_decoder_does_not_compute_is_refused_by_name(
        architecture: str, more: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        from_gguf(tmp_path, architecture, more=more)


@pytest.mark.parametrize("change", [
    {"architectures": 5}, {"architectures": ["x" * 9999, 1]}, {"architectures": [[]]}, {"num_attention_heads": 0},
    {"num_attention_heads": float("inf")}, {"rope_scaling": "x"}, {"rope_parameters": [1]}, {"rope_theta": 0},
    {"rope_theta": float("nan")}, {"rms_norm_eps": float("nan")}, {"max_position_embeddings": 10**15},
    {"rope_scaling": {"type": "linear", "factor": 0}}, {"eos_token_id": [[]]}, {"head_dim": [1]},
])
def test_hostile_values_in_config_json_are_model_errors(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)) as found:
        load_config(folder(tmp_path, {**LLAMA_3_2_1B, **change}))
    assert len(found.value.message) < 600


def test_config_json_of_a_hundred_thousand_levels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load_config(ModelFiles("m", tmp_path, "hf"))


@pytest.mark.parametrize(("key", "value"), [
    ("llama.attention.head_count", 0.0), ("llama.attention.head_count", float("inf")),
    ("llama.context_length", 1e12), ("llama.rope.freq_base", float("nan")),
    ("llama.attention.layer_norm_rms_epsilon", float("nan")),
])
def test_hostile_values_in_a_gguf_header_are_model_errors(key: str, value: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", SHAPE, EMBED, lambda writer: None)
    files = ModelFiles("m", path, "gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model.config.GgufFile", lambda p: _changed(GgufFile(p), key, value))
        with pytest.raises(ModelError, match=str(path)):
            load_config(files)


def _changed(file: GgufFile, key: str, value: float) -> GgufFile:
    file.metadata = {**file.metadata, key: value}
    return file
