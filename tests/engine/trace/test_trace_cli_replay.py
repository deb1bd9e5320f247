"""`trunkline replay`, as it is called, against a stub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from trace_stub import Answer, Stub, prompt_tokens

from engine.cli.background import free_port
from engine.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def write_trace(path: Path, sessions: int = 3, turns: int = 3) -> Path:
    lines = []
    for s in range(sessions):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent with one head." * 4}]
        for t in range(turns):
            messages += [{"role": "user", "content": f"session {s}, turn {t}: " + "do it " * 10},
                         {"role": "assistant", "content": f"recorded {s}.{t}"}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def replay(tmp_path: Path, stub: Stub, *options: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    trace = write_trace(tmp_path / "trace.jsonl")
    code = main(["replay", str(trace), "--url", stub.url + "/v1", "--json", str(out), *options])
    return code, json.loads(out.read_text())


def test_a_replay_counts_what_the_server_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub() as stub:
        code, report = replay(tmp_path, stub)
    assert code == 0
    assert (report["requests"], report["errors"], report["output_tokens"]) == (9, 0, 27)
    assert report["prompt_tokens"] == sum(len(prompt_tokens(b["messages"])) for b in stub.bodies)
    assert report["prompt_tokens"] == report["cached_tokens"] + report["computed_tokens"]
    assert report["tiers"]["hbm"] == report["cached_tokens"] > 0
    assert report["computed"]["last_token"] == 9
    assert report["cached_ratio"] <= report["ideal_cached_ratio"] < 1
    assert report["server"] == {"url": stub.url, "model": "stub", "notes": [], "error_messages": {}}
    assert {b["model"] for b in stub.bodies} == {"stub"}
    assert "from the cache" in capsys.readouterr().out


def test_the_ideal_is_asked_for_after_the_replay_in_vllms_form(tmp_path: Path) -> None:
    with Stub(lambda number, body: Answer(error=None if not stub.tokenized else {"error": "too soon"})) as stub:
        code, _ = replay(tmp_path, stub)
    assert (code, len(stub.tokenized)) == (0, 9)
    for body in stub.tokenized:
        assert (body["model"], body["add_generation_prompt"]) == ("stub", True)
        assert body["messages"] in [b["messages"] for b in stub.bodies]


def test_without_tokenize_the_ideal_is_null_and_it_is_said(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(has_tokenize=False) as stub:
        code, report = replay(tmp_path, stub)
    assert (code, report["ideal_cached_ratio"]) == (0, None)
    assert "no ideal_cached_ratio: the server does not answer /tokenize" in capsys.readouterr().out


def test_options_reach_the_schedule_and_the_requests(tmp_path: Path) -> None:
    both = threading.Event()

    def answer(number: int, body: dict[str, Any]) -> Answer:
        if number == 1:
            both.set()
        return Answer(gate=both)

    with Stub(answer) as stub:
        code, report = replay(tmp_path, stub, "--sessions", "2", "--max-turns", "2", "--concurrency", "2",
                              "--max-tokens", "5", "--ignore-eos", "--temperature", "0.5", "--model", "other")
    assert (code, report["requests"], stub.most_in_flight) == (0, 4, 2)
    assert {(b["max_tokens"], b["ignore_eos"], b["temperature"], b["model"]) for b in stub.bodies} == {
        (5, True, 0.5, "other")}
    settings = report["settings"]
    assert (settings["trace"], settings["sessions"], settings["concurrency"], settings["max_turns"]) == (
        "trace.jsonl", 2, 2, 2)


def test_the_text_digest_does_not_depend_on_concurrency(tmp_path: Path) -> None:
    def echo(number: int, body: dict[str, Any]) -> Answer:
        return Answer([body["messages"][-1]["content"][:25]])

    digests = set()
    for options in (["--concurrency", "1"], ["--concurrency", "3"], ["--interleave"]):
        with Stub(echo) as stub:
            digests.add(replay(tmp_path, stub, *options)[1]["text_digest"])
    assert len(digests) == 1


def test_failures_are_counted_shown_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        broken = {1: Answer(status=503, error={"error": {"message": "loading"}}), 2: Answer(["a"], cut=True),
                  4: Answer(raw=b"data: ?\n\n")}
        return broken.get(number, Answer())

    with Stub(answer) as stub:
        code, report = replay(tmp_path, stub)
    assert (code, report["requests"], report["errors"]) == (1, 9, 3)
    assert sum(report["server"]["error_messages"].values()) == 3
    out = capsys.readouterr().out
    assert "3 of 9 requests failed" in out
    assert "1 × HTTP 503: loading" in out


def test_the_context_limit_stops_a_session_and_is_no_failure(tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        if len(body["messages"]) > 4:
            return Answer(status=400, error={"error": {"message": "no", "code": "context_length_exceeded"}})
        return Answer()

    with Stub(answer) as stub:
        code, report = replay(tmp_path, stub)
    assert (code, report["requests"], report["errors"], report["stopped_at_context"]) == (0, 6, 0, 3)


def test_a_server_that_dies_in_the_middle_is_reported(tmp_path: Path) -> None:
    trace, out = write_trace(tmp_path / "t"), tmp_path / "out.json"
    with Stub() as stub:
        port = stub.url.rsplit(":", 1)[1]

        def answer(number: int, body: dict[str, Any]) -> Answer:
            if number == 2:
                stub.stop()
            return Answer()

        stub.answer = answer
        code = main(["replay", str(trace), "--url", f"127.0.0.1:{port}", "--json", str(out)])
    report = json.loads(out.read_text())
    assert code == 1
    assert report["errors"] + len(stub.bodies) >= 9
    assert report["ideal_cached_ratio"] is None


def test_no_server_no_trace_no_place_for_the_report_are_errors_to_read(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write_trace(tmp_path / "t"))
    nobody = f"http://127.0.0.1:{free_port()}"
    for words, message in [
            ([trace, "--url", nobody], "is the server running?"),
            ([str(tmp_path / "none")], "can't read the trace"),
            ([trace, "--url", nobody, "--json", str(tmp_path / "no" / "out.json")], "can't be written")]:
        assert main(["replay", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["--concurrency", "0"], ["--max-tokens", "-1"], ["--sessions", "many"], ["--max-turns", "1.5"],
    ["--speedup", "0"], ["--timeout", "nan"], ["--temperature", "-1"], ["--timeout", "inf"], ["--sessions", "²"],
])
def test_a_value_that_can_not_be_is_refused_and_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["replay", "t", *words])
    assert raised.value.code == 2
    err = capsys.readouterr().err
    assert words[0] in err
    assert words[1] in err


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    never = threading.Event()
    trace, out = write_trace(tmp_path / "t"), tmp_path / "out.json"
    with Stub(lambda number, body: Answer(gate=never if number == 4 else None)) as stub:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.cli.main", "replay", str(trace), "--url", stub.url, "--json", str(out)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ})
        for _ in range(5):
            assert stub.came.acquire(timeout=60)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        never.set()
    assert process.returncode == 130, printed
    assert "interrupted: this is what had been answered by then" in printed
    assert json.loads(out.read_text())["requests"] == 4
