"""Traces: what is read, how a format is recognised, and how a broken one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.trace.errors import TraceError
from engine.trace.formats import Session, load_trace

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
REPLY = {"role": "assistant", "content": "Hi"}


def roles(*names: str) -> list[dict[str, Any]]:
    return [{"role": name, "content": "x"} for name in names]


def jsonl(path: Path, *sessions: object) -> Path:
    path.write_text("".join(json.dumps(s) + "\n" for s in sessions), encoding="utf-8")
    return path


def test_a_line_is_a_session(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "read"}}]
    path = jsonl(tmp_path / "t", {"id": "a", "messages": [SYSTEM, USER, REPLY], "tools": tools},
                 {"messages": [USER, REPLY]})
    trace = load_trace(path)
    assert trace.sessions == [Session("a", [SYSTEM, USER, REPLY], tools), Session("line-2", [USER, REPLY])]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": [USER, REPLY]}).encode() + b"\n\n  \n")
    assert len(load_trace(path).sessions) == 1


def test_tau_bench_is_recognised_by_content_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps([{"task_id": 7, "trial": 1, "reward": 0.0, "info": {}, "traj": [USER, REPLY]}]))
    trace = load_trace(path)
    assert (trace.format, trace.sessions) == ("tau-bench JSON", [Session("7.1", [USER, REPLY])])


def test_only_as_many_sessions_are_read_as_are_wanted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t", {"messages": [USER, REPLY]}, {"messages": "broken"})
    assert len(load_trace(path, sessions=1).sessions) == 1


@pytest.mark.parametrize(("messages", "ends"), [
    (roles("system", "user", "assistant", "user", "assistant"), [2, 4]),
    (roles("user", "assistant", "tool", "assistant", "user"), [1, 3]),           # what follows has no reply
    (roles("user", "assistant", "assistant", "tool", "assistant"), [1, 4]),      # a run is one reply
    (roles("assistant", "user", "assistant"), [2]),                              # nothing precedes a greeting
    (roles("system", "user"), [2]),                                              # no reply yet: one turn
    (roles("assistant"), []),
])
def test_a_turn_ends_before_a_recorded_reply(messages: list[dict[str, Any]], ends: list[int]) -> None:
    assert Session("s", messages).turns() == ends


def test_one_wait_is_for_every_turn_but_the_first(tmp_path: Path) -> None:
    messages = roles("user", "assistant", "user", "assistant", "user", "assistant")
    path = jsonl(tmp_path / "t", {"messages": messages, "wait_ms": 250},
                 {"messages": messages, "wait_ms": [5, 0, 1.5]})
    assert [s.wait_ms for s in load_trace(path).sessions] == [[0.0, 250.0, 250.0], [5.0, 0.0, 1.5]]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "the file is empty"),
    "only blanks": (b" \n\n", "the file is empty"),
    "another format": (b"timestamp,input\n1,2\n", "not a trace that is known here"),
    "a list of something else": (b"[1, 2]", "not a trace that is known here"),
    "cut short": (b'{"messages": [{"role": "user", "con', "line 1: not JSON: .* at column"),
    "second line broken": (b'{"messages": [{"role": "user", "content": "x"}]}\n{"messages"', "line 2: not JSON"),
    "no object": (b'{"messages": [{"role": "user", "content": "x"}]}\n[1]\n', r"line 2: \[1\] is not an object"),
    "no UTF-8": (b'{"messages": "\xff"}', "line 1: not UTF-8 at byte"),
    "nested too deeply": (b'{"messages": ' + b"[" * 200_000, "line 1: not (readable|JSON)"),
    "no messages": (b'{"prompt": "x"}', r"line 1, messages: missing \(keys there: prompt\)"),
    "messages of another type": (b'{"messages": {"role": "user"}}', "line 1, messages: .* is not a list"),
    "no message": (b'{"messages": []}', "line 1, messages: the list is empty"),
    "not a message": (b'{"messages": [3]}', r"line 1, messages\[0\]: 3 is not a message"),
    "unknown role": (b'{"messages": [{"role": "robot", "content": ""}]}',
                     r"line 1, messages\[0\].role: 'robot' is none of system, developer, user"),
    "role of another type": (b'{"messages": [{"role": ["user"], "content": ""}]}', r"messages\[0\].role: \['user'\]"),
    "no content": (b'{"messages": [{"role": "user"}]}', r"line 1, messages\[0\].content: missing"),
    "content of another type": (b'{"messages": [{"role": "user", "content": 5}]}',
                                r"line 1, messages\[0\].content: 5 is neither text nor"),
    "calls of another type": (b'{"messages": [{"role": "assistant", "tool_calls": 1}]}',
                              r"messages\[0\].tool_calls: 1 is not a list"),
    "a call without a name": (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
                              r"messages\[0\].tool_calls\[0\]: .* has no function.name"),
    "tools of another type": (b'{"messages": [{"role": "user", "content": "x"}], "tools": "all"}',
                              "line 1, tools: 'all' is not a list"),
    "a negative wait": (b'{"messages": [{"role": "user", "content": "x"}], "wait_ms": -1}',
                        "line 1, wait_ms: -1 is neither a number of ms"),
    "a wait that is no number": (b'{"messages": [{"role": "user", "content": "x"}], "wait_ms": ["1"]}',
                                 r"line 1, wait_ms\[0\]: '1' is not a number of ms"),
    "an endless wait": (b'{"messages": [{"role": "user", "content": "x"}], "wait_ms": Infinity}', "wait_ms: inf"),
    "too many waits": (b'{"messages": [{"role": "user", "content": "x"}], "wait_ms": [1, 2]}',
                       "line 1, wait_ms: 2 waits for 1 turns"),
    "an id of another type": (b'{"messages": [{"role": "user", "content": "x"}], "id": {}}', "line 1, id: {}"),
    "tau-bench cut short": (b'[{"task_id": 1,\n "traj": [', "line 2: not JSON"),
    "tau-bench without traj": (b'[{"task_id": 1}]', r"session 0 \(task_id 1\), traj: missing"),
    "tau-bench with another item": (b'[{"task_id": 1, "traj": [{"role": "user", "content": "x"}]}, 5]',
                                    "session 1: 5 is not an object"),
    "tau-bench with a bad message": (b'[{"task_id": 4, "traj": [{"role": "user", "content": "x"}, {}]}]',
                                     r"session 0 \(task_id 4\), traj\[1\].role: None"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_named_with_its_place(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load_trace(path)


def test_what_can_not_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere.*No such file"):
        load_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="Is a directory"):
        load_trace(tmp_path)


def test_a_long_value_is_shown_short(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t", {"messages": [{"role": "x" * 10_000}]})
    with pytest.raises(TraceError) as raised:
        load_trace(path)
    assert len(raised.value.message) < 300


def test_the_real_tau_bench_file_is_read_whole() -> None:
    path = SHARED / "taubench_airline.json"
    if not path.exists():
        pytest.skip("needs ../shared/data/traces/taubench_airline.json: not found")
    trace = load_trace(path)
    said = sum(m["role"] == "assistant" for s in trace.sessions for m in s.messages)
    assert (len(trace.sessions), said, trace.turns()) == (100, 1229, 1229)
    assert trace.turns(max_turns=6) < 600


BIG = "9" * 5000


@pytest.mark.parametrize("line", [
    f'{{"messages": [], "x": {BIG}}}', f'[{{"task_id": {BIG}, "traj": []}}]', "{" * 3 + "[" * 100_000,
])
def test_numbers_and_depths_beyond_python_are_trace_errors(tmp_path: Path, line: str) -> None:
    (tmp_path / "t").write_text(line)
    with pytest.raises(TraceError, match=r"^t.*not (readable|JSON)"):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize("wait", [BIG[:400], f"[{BIG[:400]}]"])
def test_a_wait_beyond_every_float_is_a_trace_error(tmp_path: Path, wait: str) -> None:
    (tmp_path / "t").write_text(f'{{"messages": {json.dumps([USER, REPLY])}, "wait_ms": {wait}}}')
    with pytest.raises(TraceError, match="wait_ms"):
        load_trace(tmp_path / "t")
