"""A model's fingerprint: the digest of all that a block's bytes depend on, besides its tokens.

Blocks that were computed under another fingerprint are never found, so what is left out here would be a wrong hit:
weights (whole, by their bytes: names and times may lie), the shape that was read from them with rope and its
scaling, the tokenizer, the type of KV, the layout of a block, and, where equal inputs are to give equal bits, what
else those bits depend on. No torch here: whoever computes passes its facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.library import ModelFiles

#: How KV of a block lies in a record. Another layout is another fingerprint.
LAYOUT = "[layer][K|V][block_size][kv_heads][head_dim]"
#: Beside the weights, what a Hugging Face folder holds that changes a token or its KV.
HF_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
            "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")
READ_BYTES = 1 << 22


def fingerprint(files: ModelFiles, config: ModelConfig, dtype: str, block_size: int, *,
                deterministic_facts: Mapping[str, str]) -> bytes:
    """32 bytes: SHA-256 over the parts, each with its length before it. `dtype` is that of weights and KV as they
    are computed with. Raises ModelError where a file can't be read."""
    out = hashlib.sha256()
    for part in _parts(files, config, dtype, block_size, deterministic_facts):
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()


def _parts(files: ModelFiles, config: ModelConfig, dtype: str, block_size: int,
           facts: Mapping[str, str]) -> Iterator[bytes]:
    yield b"trunkline fingerprint 1"
    for name, path in _contents(files):
        yield name.encode()
        yield _digest(path)
    yield repr(config).encode()
    for text in (dtype, LAYOUT, str(block_size)):
        yield text.encode()
    for key in sorted(facts):
        yield f"{key}={facts[key]}".encode()


def _contents(files: ModelFiles) -> list[tuple[str, Path]]:
    """The files, under names that do not depend on where they lie; a GGUF holds everything in one."""
    if files.kind == "gguf":
        return [("gguf", files.path)]
    shards = sorted(files.path.glob("*.safetensors"))
    return [(p.name, p) for p in (*shards, *(files.path / n for n in HF_FILES)) if p.is_file()]


def _digest(path: Path) -> bytes:
    """xxh3 of the whole file: weights are trusted (they are run), only told apart; it reads as fast as the disk."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                hasher.update(buffer[:n])
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from e
    return hasher.digest()
