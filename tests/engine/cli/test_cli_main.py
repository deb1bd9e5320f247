from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli import models, pull
from engine.errors import ModelError
from engine.model.library import InstalledModel, ModelFiles


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(words)
    except SystemExit as e:
        code = int(e.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys)
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)
    assert outcome(capsys, "--help")[1] == out


def test_help_of_serve_has_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "serve", "--help")
    assert code == 0
    assert "--hbm SIZE" in out
    assert "[default: 1 GiB; env" in " ".join(out.split())


@pytest.mark.parametrize(("words", "said"), [
    (["srve"], "invalid choice: 'srve'"),
    (["serve", "--hbn", "1GiB"], "unknown argument '--hbn' (did you mean --hbm?)"),
    (["serve", "--mod", "x"], "unknown argument '--mod' (did you mean --model?)"),
    (["serve", "smollm2"], "unknown argument 'smollm2'"),
    (["serve", "--hbm", "1G"], "--hbm: '1G'"),
    (["pull"], "NAME"),
])
def test_a_mistake_is_two_lines_on_stderr_and_exit_code_2(
        words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "version")
    assert code == 0
    assert out.startswith("trunkline ")
    assert "Python 3" in out


def test_models_lists_what_is_installed(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [InstalledModel("smollm2", tmp_path / "m.gguf", "gguf", 98 * 2**20)]
    monkeypatch.setattr(models, "installed", lambda: rows)
    code, out, _ = outcome(capsys, "models")
    assert code == 0
    assert "smollm2" in out
    assert "98 MiB" in out
    monkeypatch.setattr(models, "installed", list)
    assert "trunkline pull smollm2" in outcome(capsys, "models")[1]


def test_a_name_or_path_that_looks_like_markup_is_printed_as_it_is(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "[/x]"
    monkeypatch.setattr(models, "installed", lambda: [InstalledModel("[/red]/[bold]", path, "hf", 1)])
    code, out, _ = outcome(capsys, "models")
    assert code == 0
    assert "[/red]/[bold]" in out
    monkeypatch.setattr(models, "installed", list)
    monkeypatch.setenv("TRUNKLINE_CACHE", str(path))
    assert "[/x]" in outcome(capsys, "models")[1]
    monkeypatch.setattr(pull, "pull", lambda name, progress: ModelFiles(name, path, "hf"))
    assert "[/x]" in outcome(capsys, "pull", "org/name")[1]


@pytest.mark.parametrize("host", ["a..b", "a" * 300])
def test_a_host_that_can_be_no_name_is_two_words_and_no_traceback(
        host: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "serve", "--port", "0", "--host", host)
    assert code == 2
    assert "no such address" in err
    assert "Traceback" not in err


def test_pull_says_where_the_model_is(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fake_pull(name: str, progress: pull._Bars) -> ModelFiles:
        progress("downloading", 5, 10)
        progress("downloading", 10, 10)
        return ModelFiles(name, tmp_path / "m.gguf", "gguf")
    monkeypatch.setattr(pull, "pull", fake_pull)
    code, out, _ = outcome(capsys, "pull", "smollm2")
    assert (code, out) == (0, f"smollm2 is in {tmp_path / 'm.gguf'}\n")


def test_a_start_error_has_no_traceback(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str, progress: object) -> ModelFiles:
        raise ModelError("no such model")
    monkeypatch.setattr(pull, "pull", refuse)
    code, _, err = outcome(capsys, "pull", "x")
    assert code == 2
    assert err.splitlines()[-1] == "trunkline: no such model"


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str, progress: object) -> ModelFiles:
        raise KeyboardInterrupt
    monkeypatch.setattr(pull, "pull", interrupted)
    code, _, err = outcome(capsys, "pull", "x")
    assert code == 130
    assert "Traceback" not in err


def environment(tmp_path: Path) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith("TRUNKLINE_")},
            "TRUNKLINE_CACHE": str(tmp_path), "PYTHONUNBUFFERED": "1"}


def test_serve_on_a_port_in_use_exits_with_2_and_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([sys.executable, "-m", "engine.cli.main", "serve", "--port", str(port)],
                              env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trunkline: 127.0.0.1 port {port} is in use")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_serve_with_0_and_no_traceback(tmp_path: Path, signum: signal.Signals) -> None:
    code = ("import asyncio, sys\nfrom engine.api import server\nfrom engine.config import ServeConfig\n"
            "class Core:\n"
            "    state, info = 'loading', None\n"
            "    async def ready(self): await asyncio.Event().wait()\n"
            "    async def flush(self): return None\n"
            "    async def close(self): print('closed')\n"
            "async def start(config, secret_check): print('started'); return Core()\n"
            "sys.exit(asyncio.run(server.serve(ServeConfig(port=0), start_core=start,\n"
            "    find=lambda config, progress: ('m', lambda: None))))\n")
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(tmp_path), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    while "started" not in (line := process.stdout.readline()):
        assert line, "the server ended"
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines() == ["stopping", "closed"]
