"""Reading a GGUF file: metadata, tensor table, dequantised tensors.

Knows the container (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; versions 2 and 3,
little-endian) and leaves the number formats to the `gguf` package. Does not know models: names and shapes are
`config.py`'s and `weights.py`'s. The package's own reader makes several numpy arrays per vocabulary entry, 2.1 s
for SmolLM2 (Zen 4); this one walks the header once, 0.05 s, and converts an entry when it is asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
#: GGUF value type -> struct code, for the fixed-size ones.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
#: The format has no limit; ggml has this one, and a broken header is found by it.
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is numpy's order (rows first), `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class _Metadata(Mapping[str, Any]):
    """Values converted when first read: the vocabulary is long, and the core never looks at it."""

    def __init__(self, header: _Header, places: dict[str, tuple[int, int]]) -> None:
        self._header = header
        self._places = places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, at = self._places[key]
            self._values[key] = self._header.value(kind, at)[0]
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Header:
    """A cursor-less reader of GGUF's primitive values; every method returns (value, offset behind it)."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data

    def u32(self, at: int) -> int:
        return int(_U32.unpack_from(self.data, at)[0])

    def u64(self, at: int) -> int:
        return int(_U64.unpack_from(self.data, at)[0])

    def string(self, at: int) -> tuple[str, int]:
        start = at + 8
        end = start + self.u64(at)
        if end > len(self.data):
            raise EOFError
        return self.data[start:end].decode("utf-8", errors="replace"), end

    def value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self.string(at)
        if kind == _ARRAY:
            return self.array(at)
        code = struct.Struct("<" + self.code(kind))
        return code.unpack_from(self.data, at)[0], at + code.size

    def array(self, at: int) -> tuple[list[Any], int]:
        kind, count, at = self.u32(at), self.u64(at + 4), at + 12
        if kind in (_STRING, _ARRAY):
            values = []
            for _ in range(count):
                value, at = self.value(kind, at)
                values.append(value)
            return values, at
        dtype = np.dtype("<" + _numpy_code(self.code(kind)))
        end = at + count * dtype.itemsize
        if end > len(self.data):
            raise EOFError
        return np.frombuffer(self.data[at:end], dtype).tolist(), end

    def skip(self, kind: int, at: int) -> int:
        if kind == _STRING:
            return at + 8 + self.u64(at)
        if kind != _ARRAY:
            return at + struct.calcsize("<" + self.code(kind))
        inner, count, at = self.u32(at), self.u64(at + 4), at + 12
        if inner == _STRING:
            return self._skip_strings(count, at)
        if inner == _ARRAY:
            for _ in range(count):
                at = self.skip(inner, at)
            return at
        return at + count * struct.calcsize("<" + self.code(inner))

    def _skip_strings(self, count: int, at: int) -> int:
        data, read = self.data, _U64.unpack_from
        for _ in range(count):
            at += 8 + read(data, at)[0]
        return at

    @staticmethod
    def code(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not known")
        return _SCALARS[kind]


def _numpy_code(code: str) -> str:
    return {"B": "u1", "b": "i1", "H": "u2", "h": "i2", "I": "u4", "i": "i4", "f": "f4", "?": "u1",
            "Q": "u8", "q": "i8", "d": "f8"}[code]


class GgufFile:
    """One GGUF file, memory-mapped; closed when the last array that came from it is gone.

    Raises ModelError when it is not a GGUF file, is cut short (with both sizes), is one part of several, or
    has a tensor type that the `gguf` package does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _open(path)
        self._header = _Header(self._map)
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, EOFError, OverflowError, RecursionError):
            raise ModelError(
                f"{path} is cut short: its {len(self._map):,} bytes end inside the header. Download it again."
            ) from None
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path} has a broken GGUF header: {error}. Download it again.") from None
        self._check_length()

    def _parse(self) -> tuple[Mapping[str, Any], dict[str, TensorInfo]]:
        head = self._header
        if (version := head.u32(4)) not in VERSIONS:
            raise ModelError(
                f"{self.path} is GGUF version {version} (or big-endian); versions {VERSIONS} can be read. "
                "Convert it again with a current llama.cpp.")
        n_tensors, n_values, at = head.u64(8), head.u64(16), 24
        places: dict[str, tuple[int, int]] = {}
        for _ in range(n_values):
            key, at = head.string(at)
            kind = head.u32(at)
            places[key] = (kind, at + 4)
            at = head.skip(kind, at + 4)
            if at > len(self._map):
                raise EOFError
        metadata = _Metadata(head, places)
        if int(metadata.get("split.count", 1)) > 1:
            raise ModelError(
                f"{self.path} is one of {metadata['split.count']} parts. "
                "Join them first with llama.cpp's `llama-gguf-split --merge`.")
        return metadata, self._tensor_table(n_tensors, at, int(metadata.get("general.alignment", 0)))

    def _tensor_table(self, count: int, at: int, alignment: int) -> dict[str, TensorInfo]:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, at = self._header.string(at)
            dims = self._header.u32(at)
            if not 1 <= dims <= MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {dims} dimensions")
            shape = struct.unpack_from(f"<{dims}Q", self._map, at + 4)
            at += 4 + 8 * dims
            kind, offset = struct.unpack_from("<IQ", self._map, at)
            at += 12
            entries.append((name, tuple(reversed(shape)), kind, offset))
        alignment = alignment or DEFAULT_ALIGNMENT
        start = -(-at // alignment) * alignment
        return {name: self._info(name, shape, kind, start + offset) for name, shape, kind, offset in entries}

    def _info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quant = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(
                f"{self.path}: tensor {name!r} has number format {kind}, which the installed gguf package does "
                "not know. Upgrade it (`pip install -U gguf`) or use another quantisation.") from None
        per_block, block_bytes = GGML_QUANT_SIZES[quant]
        if 0 in shape:
            raise ValueError(f"tensor {name!r} has shape {list(shape)}")
        if shape[-1] % per_block:
            raise ValueError(f"tensor {name!r}: rows of {shape[-1]} don't divide by {per_block} ({quant.name})")
        count = 1
        for size in shape:
            count *= size
        return TensorInfo(name, shape, quant.name, offset, count // per_block * block_bytes)

    def _check_length(self) -> None:
        if not self.tensors:
            raise ModelError(f"{self.path} has no tensors: it is a vocabulary without a model.")
        last = max(self.tensors.values(), key=lambda t: t.offset + t.nbytes)
        if (end := last.offset + last.nbytes) > len(self._map):
            raise ModelError(
                f"{self.path} is cut short: it has {len(self._map):,} bytes, and tensor {last.name!r} ends at "
                f"{end:,}. Download it again.")

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file: [rows, bytes a row], read-only, no copy."""
        info = self.tensor(name)
        flat = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        rows = 1
        for size in info.shape[:-1]:
            rows *= size
        return flat.reshape(rows, -1)

    def dequantise(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32 in its own shape; rows in the file's order."""
        return dequantise(self.raw(name), self.tensor(name).type).reshape(self.tensor(name).shape)

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}: it is not what its header says.")
        return self.tensors[name]


def dequantise(raw: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """Rows of bytes in GGML format `kind` ("Q4_1", "F16", …) to float32 rows [rows, elements]."""
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    try:
        values = quants.dequantize(raw, GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ModelError(
            f"GGUF number format {kind} can't be dequantised by the installed gguf package. "
            "Upgrade it (`pip install -U gguf`) or use another quantisation, for example Q8_0.") from None
    return np.asarray(values, np.float32)


def _open(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from None
