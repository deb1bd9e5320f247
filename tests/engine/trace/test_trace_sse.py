"""Server-sent events, however the network cuts them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace import sse
from engine.trace.sse import SSEError, SSEReader


def read(*pieces: bytes) -> list[str]:
    reader = SSEReader()
    return [event for piece in pieces for event in reader.push(piece)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_any_of_three_ways(end: bytes) -> None:
    stream = b"data: one" + end + end + b"data:two" + end + end
    assert read(stream) == ["one", "two"]
    assert read(*(bytes([b]) for b in stream)) == ["one", "two"]


def test_comments_and_other_fields_are_passed_over() -> None:
    assert read(b": ping\n\nevent: x\nid: 1\nretry: 5\ndata: a\n\n:\n\n") == ["a"]


def test_data_lines_of_one_event_are_joined() -> None:
    assert read(b"data: a\ndata: b\ndata\n\n") == ["a\nb\n"]


def test_one_space_after_the_colon_is_dropped_and_no_more() -> None:
    assert read(b"data:  a\n\n") == [" a"]


def test_an_event_that_is_not_ended_is_not_given() -> None:
    assert read(b"data: a\n\ndata: b\n") == ["a"]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100)
    with pytest.raises(SSEError, match="more than 100 bytes"):
        read(b"data: " + b"x" * 60, b"x" * 60)


@given(st.lists(st.text(), min_size=1), st.lists(st.integers(0, 400)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_cuts_change_nothing(texts: list[str], cuts: list[int], end: str) -> None:
    events = [json.dumps({"content": t}, ensure_ascii=False) for t in texts]
    stream = "".join(f"data: {e}{end}: ping{end}{end}" for e in events).encode("utf-8", errors="replace")
    places = sorted({c for c in cuts if c < len(stream)})
    pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    assert read(*pieces) == read(stream)
    assert read(stream) == [e.encode("utf-8", errors="replace").decode() for e in events]
