"""A Hugging Face folder's safetensors files: which holds a tensor, and whether each is whole. No torch.

Format: 8 bytes of header length (little-endian), a JSON header with each tensor's byte range, the bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.config import WRONG_VALUE, read_json

INDEX = "model.safetensors.index.json"
#: The library's own limit: a longer header is a broken file.
MAX_HEADER = 100_000_000
#: Missing files that an error names.
NAMED = 8


def find_shards(folder: Path) -> dict[str, Path]:
    """Tensor name → the file that holds it. Raises ModelError on a missing, cut or broken file."""
    if (folder / INDEX).is_file():
        names = sorted(set(_index(folder / INDEX).values()))
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            more = ", …" if len(missing) > NAMED else ""
            raise ModelError(f"{folder} lacks {len(missing)} of its {len(files)} weight files: "
                             f"{', '.join(missing[:NAMED])}{more}. Download them again.")
    else:
        # A repository may hold the weights a second time (Mistral's consolidated.safetensors).
        whole = folder / "model.safetensors"
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no .safetensors files. (Files of pickled tensors are not read: "
                             "convert the model to safetensors.)")
    return {name: file for file in files for name in read_header(file)}


def _index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map. Download it again.")
    for name in weight_map.values():
        # Files beside the index and no others: a model's files must not name the rest of the disk.
        if not isinstance(name, str) or Path(name).name != name or len(name) > 255:
            raise ModelError(f"{path} names {str(name)[:200]!r} as a weight file; it must be the name of a file beside "
                             "it. Download it again.")
    return weight_map


def read_header(path: Path) -> dict[str, Any]:
    """The tensors' entries, once the file's length has been found to hold them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            raise ModelError(f"{path} is cut short or no safetensors file: {size:,} bytes, and its header says "
                             f"that it is {length:,} bytes long. Download it again.")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        except (LookupError, *WRONG_VALUE):
            raise ModelError(f"{path} has a broken safetensors header. Download it again.") from None
    if end > size:
        raise ModelError(f"{path} is cut short: it has {size:,} bytes, and its tensors end at {end:,}. "
                         "Download it again.")
    return entries
