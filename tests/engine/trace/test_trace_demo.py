"""The demo's trace is what its script writes; the demo command, with a stub in the server's place."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.cli import demo
from engine.cli.background import BackgroundServer, own_environment
from engine.cli.demo import Cold, bounded, saved
from engine.errors import ModelError, StartError
from engine.model.library import ModelFiles, resolve
from engine.text.template import load_template
from engine.text.tokenizer import load_tokenizer
from engine.trace.formats import Session, Trace, load_trace

ROOT = Path(__file__).resolve().parents[3]
TRACES = ROOT / "bench" / "traces"
DEMO = TRACES / "demo.jsonl"
STUB = Path(__file__).with_name("trace_stub.py")


def test_the_script_writes_the_same_bytes_again(tmp_path: Path) -> None:
    out = tmp_path / "again.jsonl"
    subprocess.run([sys.executable, "-B", str(TRACES / "make_demo_trace.py"), "--out", str(out)], check=True,
                   cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": "7"}, timeout=120)
    assert out.read_bytes() == DEMO.read_bytes()


def test_the_trace_is_what_the_demo_promises() -> None:
    sessions = load_trace(DEMO).sessions
    turns = [len(s.turns()) for s in sessions]
    assert len(sessions) == 8
    assert all(6 <= n <= 10 for n in turns)
    assert sum(turns) <= demo.MAX_TURNS
    assert len({s.messages[0]["content"] for s in sessions}) == 1
    assert DEMO.stat().st_size <= 400 * 1024
    assert all(s.messages[-1]["role"] == "assistant" and "tool_calls" not in s.messages[-1] for s in sessions)


def test_two_sessions_fork_from_the_middle_of_another() -> None:
    sessions = {s.id: s.messages for s in load_trace(DEMO).sessions}
    for name, origin in (("powers-another-way", "powers"), ("retries", "queue-order")):
        a, b = sessions[name], sessions[origin]
        same = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        assert 4 < same < len(b) - 4
        assert a[:same] == b[:same]


def test_the_tools_answers_are_of_the_project_alone() -> None:
    """No time, no path of the machine that wrote it, and no tool that failed."""
    text = DEMO.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|usr)/|Traceback|\d\.\d+ ?s\b", text)
    answers = [m["content"] for s in load_trace(DEMO).sessions for m in s.messages if m["role"] == "tool"]
    assert len(answers) == 51
    assert not any(a.startswith("error:") for a in answers)


def test_every_prompt_fits_the_models_context() -> None:
    try:
        files = resolve(demo.MODEL, download=False)
    except ModelError:
        pytest.skip(f"needs {demo.MODEL} in the cache (trunkline pull {demo.MODEL}): not found")
    tokenizer = load_tokenizer(files)
    template = load_template(files, None, tokenizer)
    for session in load_trace(DEMO).sessions:
        ids = tokenizer.encode(template.render_chat(session.messages))
        assert len(ids) // 4 <= 6000
    head = tokenizer.encode(load_trace(DEMO).sessions[0].messages[0]["content"])
    assert 900 <= len(head) // 4 <= 1300


def test_a_longer_trace_is_cut_to_whole_sessions() -> None:
    def turns(n: int) -> Session:
        return Session(str(n), [{"role": r, "content": ""} for _ in range(n) for r in ("user", "assistant")])

    assert [s.id for s in bounded(Trace("t", "f", [turns(30), turns(29), turns(2)])).sessions] == ["30", "29"]
    assert [s.id for s in bounded(Trace("t", "f", [turns(100), turns(1)])).sessions] == ["100"]


def test_what_was_saved_is_an_estimate_that_says_how() -> None:
    report = {"cached_tokens": 7000, "prompt_tokens": 8000, "wall_s": 12.3, "tiers": {"hbm": 7000, "ram": 0}}
    text = saved(report, Cold(tokens=1400, seconds=2.0))
    assert "7,000 of 8,000 prompt tokens" in text
    assert "about [bold]10 s[/]" in text
    assert "one cold prompt of 1,400 tokens" in text
    assert "about" not in saved(report, None)


def test_what_was_restored_is_said_by_tier() -> None:
    assert demo.restored({"hbm": 7000, "ram": 0, "nvme": 0}, 7000) == ""
    text = demo.restored({"hbm": 600, "ram": 100, "nvme": 300}, 1000)
    assert "40%[/] of them had left HBM" in text
    assert "100 from RAM, 300 from NVMe" in text


def test_larger_blocks_get_as_much_more_room(tmp_path: Path) -> None:
    assert demo.arguments(tmp_path, demo.BLOCK_BYTES)[2:6] == ["--hbm", "112MiB", "--ram", "64MiB"]
    assert demo.arguments(tmp_path, 2 * demo.BLOCK_BYTES)[2:6] == ["--hbm", "224MiB", "--ram", "128MiB"]


def test_a_key_or_a_config_of_the_users_is_no_part_of_the_demos_server() -> None:
    environment = {"TRUNKLINE_API_KEY": "k", "TRUNKLINE_CONFIG": "c", "TRUNKLINE_CACHE": "d", "PATH": "p"}
    assert own_environment(environment) == {"TRUNKLINE_CACHE": "d", "PATH": "p", "PYTHONPATH": str(ROOT)}


def run_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    monkeypatch.setattr(demo, "BackgroundServer", partial(BackgroundServer, command=command))
    monkeypatch.setattr(demo, "resolve", lambda name, download: ModelFiles(name, tmp_path, "gguf"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = demo.run(argparse.Namespace(trace=None, concurrency=4, json=out))
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, json.loads(out.read_text())


def listening(text: str) -> bool:
    port = re.search(r"127\.0\.0\.1:(\d+), ready", text)
    assert port is not None, text
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port[1]))) == 0


def test_the_demo_serves_replays_reports_and_stops(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_demo(monkeypatch, tmp_path, [sys.executable, str(STUB)])
    printed = capsys.readouterr().out
    assert (code, report["requests"], report["errors"]) == (0, 59, 0)
    assert (report["settings"]["max_tokens"], report["settings"]["concurrency"]) == (24, 4)
    for part in ("1/4", "2/4", "3/4", "4/4", "the last turn of session powers again", "from the cache",
                 "what the cache saved", "What to try next", "serve --model"):
        assert part in printed
    assert not listening(printed)


def test_failed_turns_make_the_demo_fail_and_show_the_servers_log(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_demo(monkeypatch, tmp_path, [sys.executable, str(STUB), "--fail"])
    printed = capsys.readouterr().out
    assert code == 1
    assert report["errors"] == 59 - 8       # this stub answers first turns
    assert "the stub is out of order" in printed
    assert re.search(r"end of the server's log.*\n.*chat \d+", printed)
    assert not listening(printed)


def test_a_server_that_does_not_start_is_shown_by_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no room for the pool')"]
    with pytest.raises(StartError, match=r"(?s)ended with exit code 1.*no room for the pool"):
        run_demo(monkeypatch, tmp_path, broken)


def test_outside_a_checkout_the_demo_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "engine" / "cli" / "demo.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=r"make demo.*--trace FILE"):
        demo.find_trace()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_too(sent: signal.Signals) -> None:
    printed = signalled(sent)
    assert printed.rstrip().endswith("130"), printed
    assert not listening(printed)


def test_a_demo_that_is_killed_outright_leaves_no_server() -> None:
    printed = signalled(signal.SIGKILL)
    for _ in range(100):            # the kernel tells the server; it takes a moment to stop
        if not listening(printed):
            return
        time.sleep(0.1)
    raise AssertionError(printed)


def signalled(sent: signal.Signals) -> str:
    """What a demo prints that gets a signal while its agents play against a server that hangs."""
    script = f"""
import sys
from functools import partial
from pathlib import Path
from engine.cli import demo, main
from engine.model.library import ModelFiles
demo.BackgroundServer = partial(demo.BackgroundServer, command=[sys.executable, {str(STUB)!r}, "--hang"])
demo.resolve = lambda name, download: ModelFiles(name, Path("."), "gguf")
print(main.main(["demo"]))
"""
    process = subprocess.Popen([sys.executable, "-u", "-c", script], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if "sessions at once" in line:
            break
    process.send_signal(sent)
    printed += process.stdout.read()
    process.wait(timeout=60)
    process.stdout.close()
    return printed
