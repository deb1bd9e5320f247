"""What a server does when it can't start: exit code 2, one line that says what and what to do, no traceback."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from e2e_server import END_S, ROOT, START_S, Server, command, environment

from engine.model.library import ModelFiles


def refused(device: str, *options: str) -> str:
    """The last line of stderr of a server that must not start."""
    done = subprocess.run(command("--device", device, "--port", "0", *options), cwd=ROOT, env=environment(),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S)
    said = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert said[-1].startswith("trunkline: ")
    return said[-1]


@pytest.mark.parametrize("part", [0.6, 0.001])
def test_a_model_file_that_is_cut_short(model: ModelFiles, device: str, tmp_path: Path, part: float) -> None:
    """In its tensors; in its metadata."""
    short, size = tmp_path / "short.gguf", int(model.path.stat().st_size * part)
    with model.path.open("rb") as whole, short.open("wb") as out:
        out.write(whole.read(size))
    said = refused(device, "--model", str(short))
    assert "short.gguf" in said
    assert f"{size:,}" in said or str(size) in said


@pytest.mark.slow
def test_a_model_file_that_is_none(model: ModelFiles, device: str, tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_text("just text")
    assert "none.gguf" in refused(device, "--model", str(tmp_path / "none.gguf"))


def test_a_model_that_is_not_there(device: str) -> None:
    assert "no-such-model" in refused(device, "--model", "no-such-model")


def test_no_room_for_the_pool_names_what_is_asked_and_what_is_there(model: ModelFiles, device: str) -> None:
    said = refused(device, "--model", "smollm2", "--hbm", "90TiB")
    assert "--hbm" in said
    assert "90 TiB" in said
    assert "GiB are available" in said


@pytest.mark.slow
def test_a_pool_that_holds_nothing(model: ModelFiles, device: str) -> None:
    assert "--hbm" in refused(device, "--model", "smollm2", "--hbm", "1KiB")


@pytest.mark.slow
def test_a_context_that_the_model_has_not_got(model: ModelFiles, device: str) -> None:
    assert "999999" in refused(device, "--model", "smollm2", "--hbm", "16MiB", "--max-context", "999999")


def test_a_template_that_is_broken_names_its_line(model: ModelFiles, device: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{{ messages }}\n{% for m in %}")
    said = refused(device, "--model", "smollm2", "--hbm", "16MiB", "--chat-template", str(tmp_path / "broken.jinja"))
    assert "line 2" in said
    assert "--chat-template" in said


def test_a_port_in_use_is_refused_and_its_owner_lives(server: Server, device: str) -> None:
    port = server.url.rpartition(":")[2]
    said = refused(device, "--model", "smollm2", "--port", port)
    assert f"port {port} is in use" in said
    assert "--port" in said
    assert server.ask("/health").status == 200


def test_a_copy_of_the_model_is_served_by_its_path(model: ModelFiles, start: object, tmp_path: Path) -> None:
    """A path works wherever a name does; and the port answers "loading" before the model is there."""
    copy = tmp_path / "copy of it.gguf"
    shutil.copyfile(model.path, copy)
    server: Server = start("--model", str(copy), "--hbm", "16MiB", "--served-model-name", "mine",  # type: ignore[operator]
                           "--alias", "gpt-4o").listening()
    health = server.ask("/health")
    assert (health.status, health.body["status"]) in ((503, "loading"), (200, "ok"))
    early = server.ask("/v1/models")
    assert early.status == 200 or (early.error["code"], early.headers["Retry-After"] != "") == ("loading", True)
    server.ready()
    assert server.ask("/health").body == {"status": "ok"}
    assert [m["id"] for m in server.ask("/v1/models").body["data"]] == ["mine", "gpt-4o"]
    assert server.chat("Hi", model="gpt-4o", max_tokens=2).body["model"] == "mine"
    assert server.stop() == 0
    assert server.process.wait(END_S) == 0
