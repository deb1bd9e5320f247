"""A stop string never leaks, nothing is lost, and nothing is held back longer than it must be (PITFALLS 56)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.text.detokenizer import StopStrings


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first place where some stop ends, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` with which some stop begins."""
    return max((n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) and s != text[-n:] for s in stops)),
               default=0)


texts = st.text("abc", max_size=24)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@settings(max_examples=600, deadline=None)
@given(text=texts, stops=stop_lists, cuts=st.sets(st.integers(0, 24)))
def test_any_cut_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: set[int]) -> None:
    filter_ = StopStrings(stops)
    sent, seen, matched = "", "", None
    for start, end in pairwise(sorted({0, len(text), *(c for c in cuts if c < len(text))})):
        seen += text[start:end]
        emit, matched = filter_.push(text[start:end])
        sent += emit
        if matched is None:
            assert len(sent) == len(seen) - held_back(seen, stops)
        assert not any(stop in sent for stop in stops)
    sent += filter_.flush()
    assert (sent, matched) == reference(text, stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "matched"),
    [
        (["</s>"], ["Hi <", "/", "s> more"], ["Hi ", "", ""], "</s>"),
        (["</s>"], ["Hi <", "/b>"], ["Hi ", "</b>"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["END", "EN"], ["xE", "ND"], ["x", ""], "EN"),
        (["abcd", "c"], ["ab", "c"], ["", "ab"], "c"),
        (["xab", "b"], ["xa", "b"], ["", ""], "xab"),
        ([], ["a", "b"], ["a", "b"], None),
        (["é😀"], ["xé", "😀y"], ["x", ""], "é😀"),
    ],
)
def test_known_cases(stops: list[str], pieces: list[str], sent: list[str], matched: str | None) -> None:
    filter_ = StopStrings(stops)
    results = [filter_.push(piece) for piece in pieces]
    assert [r.emit for r in results] == sent
    assert results[-1].matched == matched


def test_after_a_match_nothing_comes_any_more() -> None:
    filter_ = StopStrings(["x"])
    assert filter_.push("axb") == ("a", "x")
    assert filter_.push("cxd") == ("", "x")
    assert filter_.flush() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    filter_ = StopStrings(["stop"])
    assert filter_.push("a sto").emit == "a "
    assert filter_.flush() == "sto"
    assert filter_.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty string"):
        StopStrings(["a", ""])
