from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Quant

from engine.errors import ModelError
from engine.model.gguf import GgufFile
from engine.model.weights import CHUNK, _store

#: The types that the gguf package can write, with the largest error it may make (in parts of a block's range).
WRITABLE = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 1 / 250, "Q5_0": 1 / 30, "Q5_1": 1 / 60, "Q4_0": 1 / 14,
            "Q4_1": 1 / 28}


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Quant]], values: dict[str, Any] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (values or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_quantised_matrix_is_read_back(kind: str, tmp_path: Path) -> None:
    original = np.random.default_rng(0).standard_normal((48, 256), np.float32)
    raw = gguf.quants.quantize(original, Quant[kind])
    found = GgufFile(write(tmp_path / "m.gguf", {"w": (raw, Quant[kind])})).dequantise("w")
    assert found.shape == (48, 256)
    assert found.dtype == np.float32
    assert np.array_equal(found, gguf.quants.dequantize(raw, Quant[kind]))
    blocks = original.reshape(48, -1, 32)
    scale = (blocks.max(-1) - blocks.min(-1)) if kind.startswith("Q") else abs(blocks).max(-1)
    assert (abs(found - original).reshape(48, -1, 32).max(-1) <= scale * WRITABLE[kind] + 1e-7).all()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K"])
def test_k_quants_are_read_as_the_package_reads_them(kind: str, tmp_path: Path) -> None:
    """It can't write them, so the bytes are random, with scales that are no NaN."""
    random = np.random.default_rng(1)
    size = gguf.GGML_QUANT_SIZES[Quant[kind]][1]
    raw = random.integers(0, 256, (6, 2 * size), np.uint8)
    raw.view(np.uint16)[...] &= 0xBFFF  # clears the exponent's top bit: any two bytes are a small float16
    found = GgufFile(write(tmp_path / "m.gguf", {"w": (raw, Quant[kind])})).dequantise("w")
    assert found.shape == (6, 512)
    assert np.isfinite(found).all()
    assert np.array_equal(found, gguf.quants.dequantize(raw, Quant[kind]))


def test_blocks_worked_by_hand(tmp_path: Path) -> None:
    """Q4_0: (low nibbles, then high) - 8, times d. Q4_1: nibble · d + m. Q8_0: int8 · d."""
    half = lambda x: np.float16(x).tobytes()  # noqa: E731
    nibbles = bytes(low | (15 - low) << 4 for low in range(16))
    q4_0 = np.frombuffer(half(0.5) + nibbles, np.uint8)[None]
    q4_1 = np.frombuffer(half(0.25) + half(-1) + nibbles, np.uint8)[None]
    q8_0 = np.frombuffer(half(2) + np.arange(-16, 16, dtype=np.int8).tobytes(), np.uint8)[None]
    file = GgufFile(write(tmp_path / "m.gguf", {
        "a": (q4_0, Quant.Q4_0), "b": (q4_1, Quant.Q4_1), "c": (q8_0, Quant.Q8_0)}))
    order = np.array([*range(16), *range(15, -1, -1)], np.float32)
    assert np.array_equal(file.dequantise("a")[0], (order - 8) * 0.5)
    assert np.array_equal(file.dequantise("b")[0], order * 0.25 - 1)
    assert np.array_equal(file.dequantise("c")[0], np.arange(-16, 16) * 2.0)


def test_values_are_rounded_to_the_nearest_even_bf16() -> None:
    """1 + 2⁻⁸ lies between 1 and 1 + 2⁻⁷ and goes to the even one; 1 + 3·2⁻⁸ goes up; longer than one piece."""
    halfway = np.tile(np.float32([1 + 2**-8, 1 + 3 * 2**-8]), CHUNK // 4)
    out = torch.empty(len(halfway), dtype=torch.bfloat16)
    _store(halfway, out)
    assert out.float().unique().tolist() == [1.0, 1 + 4 * 2**-8]
    assert out.float()[::2].unique().tolist() == [1.0]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    tokens = ["<s>", "é", "Ġthe", ""]
    file = GgufFile(write(tmp_path / "m.gguf", {"w": (np.zeros((1, 4), np.float32), Quant.F32)}, {
        "words": tokens, "numbers": [3, 1, 2], "name": "ü", "count": 7}))
    assert file.metadata["words"] == tokens
    assert file.metadata["numbers"] == [3, 1, 2]
    assert file.metadata["name"] == "ü"
    assert file.metadata["count"] == 7
    assert "general.architecture" in file.metadata
    assert file.metadata.get("none") is None


def test_smollm2_reads_as_the_package_reads_it(smollm2_files: Any) -> None:
    ours, theirs = GgufFile(smollm2_files.path), gguf.GGUFReader(smollm2_files.path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes, info.type) == (
            tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
    for key in ours.metadata:
        if not key.startswith("tokenizer.ggml"):
            assert ours.metadata[key] == theirs.fields[key].contents()
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == 49152
    assert ours.metadata["tokenizer.ggml.tokens"][1000:1010] == theirs.fields[
        "tokenizer.ggml.tokens"].contents(slice(1000, 1010))


# ---- broken files -----------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", {
        "a": (np.ones((4, 64), np.float32), Quant.F32),
        "b": (gguf.quants.quantize(np.ones((4, 64), np.float32), Quant.Q8_0), Quant.Q8_0),
    }, {"words": ["x", "yy", "zzz"], "count": 7})


def test_a_file_cut_at_any_length_is_refused_with_its_size(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    assert GgufFile(whole).tensors["b"].nbytes == 4 * 68
    end = max(t.offset + t.nbytes for t in GgufFile(whole).tensors.values())
    for length in (*range(0, 700, 7), end - 1):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut short|not a GGUF file") as error:
            GgufFile(cut)
        if length >= 4:
            assert f"{length:,} bytes" in str(error.value)
    assert str(end) in str(error.value).replace(",", "")


def test_no_flipped_header_byte_escapes_as_another_error(whole: Path, tmp_path: Path) -> None:
    data = bytearray(whole.read_bytes())
    end = min(t.offset for t in GgufFile(whole).tensors.values())
    path = tmp_path / "flipped.gguf"
    for at in range(end):
        for flip in (0x01, 0x80):
            data[at] ^= flip
            path.write_bytes(data)
            data[at] ^= flip
            try:
                file = GgufFile(path)
                for name in file.tensors:
                    file.raw(name)
            except ModelError:
                pass


def test_what_is_no_gguf_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(path)
    with pytest.raises(ModelError, match="can't be read"):
        GgufFile(tmp_path / "none.gguf")


def test_other_versions_parts_and_vocabularies_are_refused(whole: Path, tmp_path: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[4:8] = struct.pack("<I", 1)
    path = tmp_path / "v1.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="version 1"):
        GgufFile(path)
    tensors = {"w": (np.zeros((1, 4), np.float32), Quant.F32)}
    with pytest.raises(ModelError, match="one of 3 parts"):
        GgufFile(write(tmp_path / "split.gguf", tensors, {"split.count": 3}))
    with pytest.raises(ModelError, match="no tensors"):
        GgufFile(write(tmp_path / "vocab.gguf", {}, {"words": ["x"]}))


def test_a_missing_tensor_is_named(whole: Path) -> None:
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_q\.weight'"):
        GgufFile(whole).raw("blk.0.attn_q.weight")
