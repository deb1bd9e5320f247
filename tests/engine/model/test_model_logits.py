"""Our decoder against Transformers on the same weights: tiny random models of each architecture, and SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_reference import all_logits, greedy, load, reference_greedy, save_random

from engine.model.decoder import Decoder
from engine.model.library import ModelFiles

transformers = pytest.importorskip("transformers")

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared"
TOLERANCE = 1e-3
COMMON = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
#: name: (config class, model class, what differs)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}),
    "llama, rope llama3": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama, rope linear": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": {
        "rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    config_class, model_class, changes = MODELS[name]
    config = getattr(transformers, config_class)(**{**COMMON, **changes})
    model, files = save_random(getattr(transformers, model_class), config, tmp_path / "model")
    ids = torch.randint(3, COMMON["vocab_size"], (200,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1  # the comparison is about something
    assert (all_logits(load(files), ids) - expected).abs().max() <= TOLERANCE


def test_logits_equal_transformers_with_a_config_of_transformers_4(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` at the top, and eos ids in generation_config.json only."""
    config = transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3)
    model, files = save_random(transformers.LlamaForCausalLM, config, tmp_path / "model")
    path = files.path / "config.json"
    raw = json.loads(path.read_text())
    raw["rope_theta"] = raw.pop("rope_parameters").pop("rope_theta")
    raw["rope_scaling"] = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    path.write_text(json.dumps(raw))
    ids = list(range(3, 163))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert (all_logits(load(files), ids) - expected).abs().max() <= TOLERANCE


# ---- SmolLM2, whose GGUF Transformers reads by its own code -----------------------------------------------

QUICK_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
)


@pytest.fixture(scope="session")
def smollm2(smollm2_files: ModelFiles) -> Decoder:
    return load(smollm2_files)


@pytest.fixture(scope="session")
def reference(smollm2_files: ModelFiles) -> Any:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    raw = load_gguf_checkpoint(str(smollm2_files.path), return_tensors=False)["config"]
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw, rope_parameters=rope)).eval()
    loaded = load_gguf_checkpoint(str(smollm2_files.path), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: torch.as_tensor(np.asarray(value)) for name, value in loaded.items()}
    missing = model.load_state_dict(tensors, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    assert not missing.unexpected_keys
    model.tie_weights()
    return model


def encode(files: ModelFiles, text: str) -> list[int]:
    from engine.text.tokenizer import load_tokenizer

    return np.frombuffer(load_tokenizer(files).encode(text), "<i4").tolist()


def test_smollm2_logits_equal_transformers(smollm2: Decoder, reference: Any, smollm2_files: ModelFiles) -> None:
    ids = encode(smollm2_files, QUICK_PROMPTS[2] + QUICK_PROMPTS[1])
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (all_logits(smollm2, ids) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("prompt", QUICK_PROMPTS)
def test_smollm2_decodes_as_transformers_does(smollm2: Decoder, reference: Any, smollm2_files: ModelFiles,
                                              prompt: str) -> None:
    ids = encode(smollm2_files, prompt)
    assert greedy(smollm2, ids, 16) == reference_greedy(reference, ids, 16)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(20))
def test_smollm2_decodes_64_tokens_as_transformers_does(smollm2: Decoder, reference: Any,
                                                        smollm2_files: ModelFiles, index: int) -> None:
    ids = encode(smollm2_files, _airline_prompt(index))[-400:]
    assert greedy(smollm2, ids, 64) == reference_greedy(reference, ids, 64)


def _airline_prompt(index: int) -> str:
    """The talk of one tau-bench session up to its third message of the assistant, as SmolLM2's template writes it."""
    path = SHARED / "data" / "traces" / "taubench_airline.json"
    if not path.is_file():
        pytest.skip("needs ../shared/data/traces/taubench_airline.json : not found")
    talk = [m for m in json.loads(path.read_text())[index]["traj"][1:] if m["content"]]
    ends = [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in talk[:ends[min(2, len(ends) - 1)]]
                   ) + "<|im_start|>assistant\n"
