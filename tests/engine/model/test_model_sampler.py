from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.model.sampler import SampleRow, kept, sample, uniform
from engine.model.sampling import Sampling

#: Probabilities .40 .30 .15 .10 .05 on ids 3, 0, 4, 1, 2.
PROBABILITIES = {3: 0.40, 0: 0.30, 4: 0.15, 1: 0.10, 2: 0.05}
LOGITS = torch.tensor([math.log(PROBABILITIES[i]) + 1.5 for i in range(5)])


def row(seed: int = 0, position: int = 0, suppress: tuple[int, ...] = (), **sampling: Any) -> SampleRow:
    return SampleRow(Sampling(max_tokens=1, **sampling), seed, position, suppress)


def draws(count: int, logits: torch.Tensor = LOGITS, **sampling: Any) -> list[int]:
    rows = [row(seed=5, position=i, **sampling) for i in range(count)]
    return sample(logits.repeat(count, 1), rows).tokens


def kept_ids(**sampling: Any) -> list[int]:
    return kept(LOGITS, Sampling(max_tokens=1, **sampling))[1].tolist()


def chi_square(found: list[int], expected: dict[int, float]) -> float:
    return sum((found.count(i) - len(found) * p) ** 2 / (len(found) * p) for i, p in expected.items())


def test_temperature_zero_and_top_k_one_take_the_likeliest() -> None:
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    expected = logits.argmax(-1).tolist()
    assert sample(logits.clone(), [row(temperature=0.0)] * 7).tokens == expected
    assert sample(logits.clone(), [row(temperature=1.0, top_k=1)] * 7).tokens == expected


def test_equal_likeliest_tokens_give_the_first_in_every_batch() -> None:
    logits = torch.zeros(3, 5000)
    logits[:, [70, 4000]] = 9.0
    for n in (1, 2, 3):
        assert sample(logits[:n].clone(), [row(temperature=0.0)] * n).tokens == [70] * n


@pytest.mark.parametrize(("temperature", "power"), [(1.0, 1.0), (0.5, 2.0), (2.0, 0.5)])
def test_temperature_gives_its_distribution(temperature: float, power: float) -> None:
    """18.47 is the 0.999 quantile of chi-square with 4 degrees of freedom; the seed is fixed."""
    total = sum(p**power for p in PROBABILITIES.values())
    expected = {i: p**power / total for i, p in PROBABILITIES.items()}
    assert chi_square(draws(4000, temperature=temperature), expected) < 18.47


def test_a_filtered_distribution_keeps_its_proportions() -> None:
    """top_k 3 leaves .40 .30 .15 of .85; 13.82 is the 0.999 quantile with 2 degrees of freedom."""
    expected = {3: 0.40 / 0.85, 0: 0.30 / 0.85, 4: 0.15 / 0.85}
    found = draws(4000, top_k=3)
    assert set(found) == {3, 0, 4}
    assert chi_square(found, expected) < 13.82


@pytest.mark.parametrize(("sampling", "ids"), [
    ({"top_k": 2}, [3, 0]),
    ({"top_k": 5}, [3, 0, 4, 1, 2]),
    ({"top_k": 99}, [3, 0, 4, 1, 2]),
    ({"top_p": 0.39}, [3]),
    ({"top_p": 0.41}, [3, 0]),  # the token that reaches it counts
    ({"top_p": 0.69}, [3, 0]),
    ({"top_p": 0.71}, [3, 0, 4]),
    ({"top_p": 0.951}, [3, 0, 4, 1, 2]),
    ({"top_p": 0.0}, [3]),  # one is always left
    ({"min_p": 0.24}, [3, 0, 4, 1]),  # .24 × .40 = .096
    ({"min_p": 0.26}, [3, 0, 4]),
    ({"min_p": 1.0}, [3]),
    ({"top_k": 3, "top_p": 0.80}, [3, 0]),  # of .85: .471, .824
    ({"top_k": 3, "top_p": 0.83}, [3, 0, 4]),
    ({"top_p": 0.71, "min_p": 0.5}, [3, 0]),
    ({"top_k": 4, "top_p": 0.99, "min_p": 0.30}, [3, 0, 4]),
])
def test_the_filters_keep_exactly_the_right_set(sampling: dict[str, Any], ids: list[int]) -> None:
    assert kept_ids(**sampling) == ids
    assert set(draws(300, **sampling)) <= set(ids)


def test_a_flat_distribution_is_sorted_as_far_as_top_p_reaches() -> None:
    """90% of 2,000 nearly equal tokens: beyond the short list that a peaked distribution needs."""
    logits = torch.linspace(0, 1e-3, 2000)
    ids = kept(logits, Sampling(max_tokens=1, top_p=0.9))[1]
    assert len(ids) == pytest.approx(1800, abs=2)
    assert ids.tolist() == list(range(1999, 1999 - len(ids), -1))
    exact = logits.double().softmax(-1).flip(0).cumsum(-1)
    assert exact[len(ids) - 2] < 0.9 + 1e-6
    assert exact[len(ids) - 1] >= 0.9 - 1e-6
    assert len(kept(logits, Sampling(max_tokens=1, min_p=0.5))[1]) == 2000


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.randn(16, 3000, generator=torch.Generator().manual_seed(3))
    rows = [row(seed=100 + i, position=i % 4, temperature=0.3 * (i % 4), top_p=0.9 if i % 2 else 1.0,
                top_k=50 if i % 3 == 0 else 0) for i in range(16)]
    together = sample(logits.clone(), rows).tokens
    assert [sample(logits[i:i + 1].clone(), rows[i:i + 1]).tokens[0] for i in range(16)] == together
    backwards = sample(logits.flip(0).clone(), rows[::-1]).tokens
    assert backwards[::-1] == together


def test_seed_and_position_both_change_the_draw_and_nothing_else_does() -> None:
    logits = torch.zeros(64, 10_000)
    by_position = sample(logits.clone(), [row(seed=1, position=i) for i in range(64)]).tokens
    by_seed = sample(logits.clone(), [row(seed=i, position=1) for i in range(64)]).tokens
    assert len(set(by_position)) > 55
    assert len(set(by_seed)) > 55
    assert sample(logits[:10].clone(), [row(seed=1, position=i + 20) for i in range(10)]).tokens == by_position[20:30]


def test_random_numbers_are_even_and_of_any_seed() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(50) for position in range(100)])
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    tenths = (numbers * 10).long().bincount(minlength=10)
    assert ((tenths - 500.0) ** 2 / 500).sum() < 27.88  # chi-square, 9 degrees of freedom, 0.999
    assert uniform(-1, 0) != uniform(1, 0)
    assert 0 <= uniform(2**70, 2**40) < 1


def test_suppressed_tokens_are_never_chosen() -> None:
    assert sample(LOGITS[None].clone(), [row(temperature=0.0, suppress=(3, 0))]).tokens == [4]
    assert 3 not in draws(500, temperature=1.0, suppress=(3,))
    assert set(draws(200, temperature=1.0, suppress=(3, 0, 4, 1))) == {2}
    assert sample(LOGITS[None].clone(), [row(temperature=0.0, suppress=(5, -1, 10**9))]).tokens == [3]
    both = sample(LOGITS.repeat(2, 1), [row(temperature=0.0, suppress=(3,)), row(temperature=0.0)])
    assert both.tokens == [0, 3]  # one row's suppression is its own


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    exact = torch.log_softmax(logits.double(), -1)
    result = sample(logits.clone(), [
        row(temperature=0.0, logprobs=3), row(temperature=0.2, top_k=5, suppress=(7,), logprobs=0),
        row(temperature=1.0)])
    first, second, third = result.logprobs
    assert first is not None
    assert second is not None
    assert third is None
    values, ids = exact[0].topk(3)
    assert [i for i, _ in first.top] == ids.tolist()
    assert [p for _, p in first.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert (first.token, first.logprob) == (result.tokens[0], pytest.approx(float(values[0]), abs=1e-5))
    assert second.top == ()
    assert second.logprob == pytest.approx(float(exact[1, result.tokens[1]]), abs=1e-5)


def test_extreme_numbers_still_give_a_token() -> None:
    huge = torch.tensor([[1e30, -1e30, 3.0], [0.0, 1.0, 2.0], [-math.inf, -math.inf, 0.5]])
    rows = [row(temperature=1.0), row(temperature=1e-30), row(temperature=2.0)]
    assert sample(huge, rows).tokens == [0, 2, 2]
    broken = torch.full((1, 4), math.nan)
    assert 0 <= sample(broken, [row(temperature=1.0)]).tokens[0] < 4
