from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model import library
from engine.model.library import WHEELS, ModelFiles, cache_dir, installed, pull, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"12345678")
    return path


def put_smollm2(cache: Path, size: int) -> Path:
    path = cache / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("TRUNKLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "trunkline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "trunkline"


def test_paths_work_wherever_a_name_does(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model")
    assert resolve(str(folder), download=False) == ModelFiles("my-model", folder, "hf")
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file), download=False) == ModelFiles("tiny.Q8_0", file, "gguf")
    (tmp_path / "one").mkdir()
    only = tmp_path / "one" / "a.gguf"
    only.write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "one"), download=False) == ModelFiles("a", only, "gguf")


def test_a_folder_that_is_no_model_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json and no \.gguf"):
        resolve(str(tmp_path), download=False)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        resolve(str(tmp_path), download=False)


@pytest.mark.parametrize("name", [
    "smolm2", "./models/none", "none.gguf", "org/none.gguf", "../no-such", "a/b/c", "/x/y"])
def test_an_unknown_name_lists_what_is_known(name: str, cache: Path) -> None:
    make_folder(cache / "models" / "org" / "here")
    with pytest.raises(ModelError) as error:
        resolve(name, download=True)
    assert "smollm2" in str(error.value)
    assert "org/here" in str(error.value)


def test_a_name_that_is_not_here_yet_says_how_to_get_it() -> None:
    for name in ("smollm2", "org/name"):
        with pytest.raises(ModelError, match=f"trunkline pull {name}"):
            resolve(name, download=False)


def test_a_pulled_name_resolves_and_is_listed(cache: Path) -> None:
    assert installed() == []
    path = put_smollm2(cache, WHEELS["smollm2"].member_size)
    folder = make_folder(cache / "models" / "org" / "name")
    assert resolve("smollm2", download=False) == ModelFiles("smollm2", path, "gguf")
    assert resolve("org/name", download=False) == ModelFiles("org/name", folder, "hf")
    assert [(m.name, m.kind, m.size) for m in installed()] == [
        ("smollm2", "gguf", WHEELS["smollm2"].member_size), ("org/name", "hf", 10)]


def test_a_file_of_another_size_does_not_count_as_installed(cache: Path) -> None:
    put_smollm2(cache, 1000)
    with pytest.raises(ModelError, match="not here yet"):
        resolve("smollm2", download=False)
    assert installed() == []


# ---- Hugging Face -----------------------------------------------------------------------------------------


def test_pull_puts_a_repository_under_its_name(cache: Path) -> None:
    def snapshot(name: str, folder: Path) -> None:
        assert name == "org/name"
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x")
        (folder / ".cache").mkdir()

    files = pull("org/name", snapshot=snapshot)
    assert files == ModelFiles("org/name", cache / "models" / "org" / "name", "hf")
    assert sorted(p.name for p in files.path.iterdir()) == ["config.json", "model.safetensors"]
    assert resolve("org/name", download=False) == files
    pull("org/name", snapshot=lambda name, folder: pytest.fail("it is there"))


def test_an_interrupted_pull_leaves_no_model_and_goes_on_from_what_it_has(cache: Path) -> None:
    def half(name: str, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ConnectionError("no route to host")

    with pytest.raises(ModelError, match=r"ConnectionError: no route to host.*network.*goes on from it"):
        pull("org/name", snapshot=half)
    assert not (cache / "models" / "org" / "name").exists()

    def rest(name: str, folder: Path) -> None:
        assert (folder / "config.json").exists()
        (folder / "model.safetensors").write_bytes(b"x")

    assert pull("org/name", snapshot=rest).path.is_dir()


def test_a_repository_without_weights_that_we_read_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no config\.json with \.safetensors"):
        pull("org/gguf-only", snapshot=lambda name, folder: (folder / "m.gguf").write_bytes(b"x") and None)


def test_the_hub_is_asked_only_for_files_that_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options, name=name))
    library._hub_snapshot("org/name", tmp_path)
    assert asked["name"] == "org/name"
    assert asked["local_dir"] == tmp_path
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [p for p in asked["allow_patterns"] if ".bin" in p or "gguf" in p]


def test_the_text_side_of_the_room_never_imports_torch() -> None:
    modules = ["config", "download", "gguf", "library", "sampling", "shards"]
    code = (f"import sys, json\nfor m in {modules}: __import__('engine.model.' + m)\n"
            "print(json.dumps('torch' in sys.modules))")
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False


@pytest.mark.parametrize("name", ["~no-such-user/x", "a" * 5000, "a\0b", "/dev/null/x"])
def test_a_name_that_can_be_no_path_is_not_known(name: str) -> None:
    with pytest.raises(ModelError, match="not known") as found:
        resolve(name, download=False)
    assert len(found.value.message) < 600


@pytest.mark.parametrize("name", ["smollm2", "org/name"])
def test_a_cache_that_can_t_be_written_is_told_with_the_way_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_CACHE", "/dev/null/x")
    with pytest.raises(ModelError, match=r"could not be stored in /dev/null/x.*TRUNKLINE_CACHE"):
        pull(name, snapshot=lambda name, folder: None)


def test_a_cache_in_a_home_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_CACHE", "~no-such-user/x")
    with pytest.raises(ModelError, match="set TRUNKLINE_CACHE"):
        cache_dir()
