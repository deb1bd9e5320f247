"""The infinite cache: by hand, and against the plain O(n²) definition."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.client import Counts, Reply
from engine.trace.ideal import common_tokens, ideal_cached_tokens, ideal_ratio
from engine.trace.replay import TurnRow


def ids(*tokens: int) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def naive(prompts: list[list[int]]) -> int:
    total = 0
    for i, prompt in enumerate(prompts):
        best = 0
        for other in prompts[:i]:
            n = 0
            while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
                n += 1
            best = max(best, n)
        total += max(0, min(best, len(prompt) - 1))
    return total


def test_the_last_token_is_always_computed() -> None:
    assert ideal_cached_tokens([ids(1, 2, 3), ids(1, 2, 3)]) == 2
    assert ideal_cached_tokens([ids(1), ids(1)]) == 0


def test_a_growing_transcript_is_new_only_at_its_end() -> None:
    assert ideal_cached_tokens([ids(1, 2), ids(1, 2, 3, 4), ids(1, 2, 3, 4, 5, 6)]) == 0 + 2 + 4


def test_any_earlier_prompt_counts_and_no_later_one() -> None:
    first, other, fork = ids(1, 2, 3, 4), ids(9, 9, 9), ids(1, 2, 3, 7)
    assert ideal_cached_tokens([first, other, fork]) == 3
    assert ideal_cached_tokens([fork, other, first]) == 3
    assert ideal_cached_tokens([other, ids(9, 8)]) == 1


def test_a_shorter_prompt_is_inside_a_longer_one() -> None:
    assert ideal_cached_tokens([ids(1, 2, 3, 4, 5), ids(1, 2, 3)]) == 2


def test_tokens_are_compared_whole() -> None:
    """1 and 257 share their first byte; half a token is not shared."""
    assert common_tokens(ids(1, 1), ids(1, 257)) == 1
    assert ideal_cached_tokens([ids(1, 257, 5), ids(1, 1, 5)]) == 1


def test_nothing_is_cached_of_nothing() -> None:
    assert ideal_cached_tokens([]) == 0
    assert ideal_cached_tokens([b"", ids(1), b""]) == 0


@given(st.lists(st.lists(st.sampled_from([0, 1, 256, 2**31 - 1, -1]), max_size=12), max_size=25))
def test_it_equals_the_plain_definition(prompts: list[list[int]]) -> None:
    assert ideal_cached_tokens(ids(*p) for p in prompts) == naive(prompts)


def row(order: int, tokens: list[int], said: int | None = None) -> TurnRow:
    reply = Reply(sent=0.0, usage=Counts(prompt=len(tokens) if said is None else said))
    return TurnRow(0, order, order, {"messages": tokens}, reply)


async def tokenize(prompt: Mapping[str, Any]) -> list[int] | None:
    return list(prompt["messages"])


def test_the_ratio_follows_the_order_of_sending_not_of_answering() -> None:
    rows = [row(2, [5, 6]), row(0, [1, 2, 3]), row(1, [1, 2, 3, 4])]
    assert asyncio.run(ideal_ratio(rows, tokenize)).ratio == 3 / 9


def test_prompts_of_another_length_than_their_usage_are_counted() -> None:
    ideal = asyncio.run(ideal_ratio([row(0, [1, 2], said=3), row(1, [1, 2])], tokenize))
    assert (ideal.ratio, ideal.differing) == (1 / 4, 1)


def test_without_a_tokenizer_there_is_no_ratio_and_it_says_so() -> None:
    async def absent(prompt: Mapping[str, Any]) -> None:
        return None

    ideal = asyncio.run(ideal_ratio([row(i, [1]) for i in range(9)], absent))
    assert (ideal.ratio, ideal.reason) == (None, "the server does not answer /tokenize for chat messages")
    assert asyncio.run(ideal_ratio([], tokenize)).ratio is None
