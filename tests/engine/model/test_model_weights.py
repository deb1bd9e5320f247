from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_reference import all_logits, load, save_random, write_gguf
from safetensors.numpy import save_file

from engine.errors import ModelError
from engine.model.config import load_config
from engine.model.library import ModelFiles
from engine.model.weights import GgufSource, gguf_name

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IDS = list(range(3, 67))


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, ModelFiles]:
    config = transformers.LlamaConfig(**TINY)
    return save_random(transformers.LlamaForCausalLM, config, tmp_path / "tiny")


def expected_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def test_shards_are_found_by_their_index(tiny: tuple[Any, ModelFiles], tmp_path: Path) -> None:
    model, _ = tiny
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    found = all_logits(load(ModelFiles("s", tmp_path / "shards", "hf")), IDS)
    assert (found - expected_logits(model)).abs().max() <= 1e-3


def test_a_missing_shard_is_named(tiny: tuple[Any, ModelFiles], tmp_path: Path) -> None:
    tiny[0].save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    lost = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of its .* weight files: {lost.name}"):
        load(ModelFiles("s", tmp_path / "shards", "hf"))


def test_bf16_weights_load_as_either_dtype(tiny: tuple[Any, ModelFiles], tmp_path: Path) -> None:
    model, _ = tiny
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    files = ModelFiles("b", tmp_path / "bf16", "hf")
    again = transformers.LlamaForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    expected = expected_logits(again)
    assert (all_logits(load(files, torch.float32), IDS) - expected).abs().max() <= 1e-3
    rough = all_logits(load(files, torch.bfloat16), IDS)
    assert rough.dtype == torch.float32
    assert (rough - expected).abs().max() <= 0.05 * expected.abs().max()


def test_safetensors_cut_at_any_length_are_refused(tiny: tuple[Any, ModelFiles]) -> None:
    path = tiny[1].path / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=f"cut short.*{length:,} bytes"):
            load(tiny[1])


def test_a_broken_safetensors_header_is_refused(tiny: tuple[Any, ModelFiles]) -> None:
    path = tiny[1].path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = ord("x")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="broken safetensors header"):
        load(tiny[1])


def test_a_folder_without_safetensors_says_what_to_do(tiny: tuple[Any, ModelFiles]) -> None:
    (tiny[1].path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors files.*convert"):
        load(tiny[1])


def test_a_missing_tensor_and_another_shape_are_named(tiny: tuple[Any, ModelFiles]) -> None:
    model, files = tiny
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    path = files.path / "model.safetensors"
    save_file({n: t for n, t in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}, path)
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(files)
    save_file({**tensors, "model.norm.weight": np.ones(65, np.float32)}, path)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \[65\].*\[64\]"):
        load(files)


def test_a_served_model_does_not_change_with_its_file(tiny: tuple[Any, ModelFiles]) -> None:
    decoder = load(tiny[1])
    before = all_logits(decoder, IDS)
    path = tiny[1].path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\x00" * (path.stat().st_size - file.tell()))
    assert torch.equal(all_logits(decoder, IDS), before)


# ---- GGUF -------------------------------------------------------------------------------------------------


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py, as it stands there."""
    return (weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
            .swapaxes(1, 2).reshape(weight.shape))


def convert(model: Any, files: ModelFiles, architecture: str, path: Path, more: Any = lambda writer: None,
            extra: dict[str, np.ndarray] | None = None) -> ModelFiles:
    config = load_config(files)
    tensors = dict(extra or {})
    for name, value in model.state_dict().items():
        array = value.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = llama_cpp_permute(array, config.n_heads if "q_proj" in name else config.n_kv_heads)
        tensors[gguf_name(name)] = array
    return ModelFiles("g", write_gguf(path, architecture, config, tensors, more), "gguf")


@pytest.mark.parametrize(("architecture", "config_class", "model_class", "changes"), [
    ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
    ("llama", "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}),
    ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
])
def test_a_gguf_computes_what_its_original_does(
        architecture: str, config_class: str, model_class: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, config_class)(**TINY, **changes)
    model, files = save_random(getattr(transformers, model_class), config, tmp_path / "hf")
    found = all_logits(load(convert(model, files, architecture, tmp_path / "m.gguf")), IDS)
    assert (found - expected_logits(model)).abs().max() <= 1e-3


def test_a_gguf_with_llama3_rope_factors_computes_what_its_original_does(tmp_path: Path) -> None:
    """The factors as convert_hf_to_gguf.py (generate_extra_tensors) writes them: what a frequency is divided by."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}
    model, files = save_random(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**TINY, rope_parameters=rope), tmp_path / "hf")
    dim = TINY["hidden_size"] // TINY["num_attention_heads"]
    factors = []
    for frequency in 1 / 1e4 ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < 32 / 4.0:
            factors.append(1.0)
        elif wavelength > 32 / 1.0:
            factors.append(8.0)
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(factors)) > 2
    gguf = convert(model, files, "llama", tmp_path / "m.gguf", extra={"rope_freqs.weight": np.float32(factors)})
    assert (all_logits(load(gguf), IDS) - expected_logits(model)).abs().max() <= 1e-3


def test_a_gguf_of_another_shape_is_refused(tiny: tuple[Any, ModelFiles], tmp_path: Path) -> None:
    files = convert(*tiny, "llama", tmp_path / "m.gguf")
    source = GgufSource(files.path, load_config(files))
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' has shape \[80, 64\].*\[80, 32\]"):
        source.read("model.layers.0.mlp.up_proj.weight", (80, 32), torch.float32)


def test_a_tensor_longer_than_one_piece_is_read_whole(tmp_path: Path) -> None:
    """Rows that end inside a piece; a type whose blocks are not whole bytes an element."""
    import gguf
    from gguf.constants import GGMLQuantizationType as Quant

    values = np.random.default_rng(0).standard_normal((1400, 96), np.float32)
    raw = gguf.quants.quantize(values, Quant.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=Quant.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = json.loads('{"n_heads": 1, "n_kv_heads": 1, "architecture": "qwen2"}')
    source = GgufSource(tmp_path / "m.gguf", type("Config", (), config))
    found = source.read("model.embed_tokens.weight", (1400, 96), torch.float32)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(raw, Quant.Q4_1))


@pytest.mark.parametrize("entry", [
    {"data_offsets": [-5, -1]}, {"data_offsets": [4, 0]}, {"dtype": "X"}, {"shape": [2**62, 2**62]},
    {"shape": [9, 9]}, {"data_offsets": [0, float("inf")]}, {"data_offsets": 5},
])
def test_a_hostile_entry_in_a_safetensors_header_is_refused(
        entry: dict[str, Any], tiny: tuple[Any, ModelFiles]) -> None:
    good = {"dtype": "F32", "shape": [96, 64], "data_offsets": [0, 4 * 96 * 64]}
    put_header(tiny[1], json.dumps({"model.embed_tokens.weight": {**good, **entry}}))
    with pytest.raises(ModelError, match="broken safetensors header"):
        load(tiny[1])


@pytest.mark.parametrize("header", ["[" * 100_000, '{"a":' * 50_000, "[]"])
def test_a_safetensors_header_that_is_no_object_is_refused(header: str, tiny: tuple[Any, ModelFiles]) -> None:
    put_header(tiny[1], header)
    with pytest.raises(ModelError, match="broken safetensors header"):
        load(tiny[1])


def put_header(files: ModelFiles, header: str) -> None:
    raw = header.encode()
    (files.path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4 * 96 * 64))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "sub/x.safetensors", ".", 5, ["x"], "x" * 5000])
def test_an_index_names_files_beside_it_and_no_others(name: Any, tiny: tuple[Any, ModelFiles]) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (tiny[1].path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="file beside it"):
        load(tiny[1])


def test_of_many_missing_weight_files_some_are_named(tiny: tuple[Any, ModelFiles]) -> None:
    index = {"weight_map": {str(i): f"f{i}" for i in range(5000)}}
    (tiny[1].path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 5000 of its 5000 weight files: .*, …") as found:
        load(tiny[1])
    assert len(found.value.message) < 500
