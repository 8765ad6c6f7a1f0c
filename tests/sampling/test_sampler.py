"""Draws: right, repeatable, and nobody else's business."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.sampling.sampler import NonFiniteLogitsError, sample, uniform

GREEDY = SamplingParams(temperature=0)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in probabilities]], dtype=torch.float32)


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return [sample(logits, [params], [position])[0].token_id for position in range(count)]


def test_greedy_takes_the_largest_whatever_the_seed():
    logits = logits_of(0.2, 0.5, 0.3)
    assert {sample(logits, [SamplingParams(temperature=0, seed=s)], [0])[0].token_id for s in range(5)} == {1}


def test_frequencies_follow_the_probabilities():
    count = 4000
    drawn = draws(logits_of(0.5, 0.3, 0.15, 0.05), SamplingParams(seed=3), count)
    expected = (0.5, 0.3, 0.15, 0.05)
    chi_square = sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in enumerate(expected))
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001; the seed is fixed, so this cannot flicker


def test_temperature_sharpens():
    cold = draws(logits_of(0.6, 0.4), SamplingParams(temperature=0.2, seed=1), 500).count(0)
    hot = draws(logits_of(0.6, 0.4), SamplingParams(temperature=2.0, seed=1), 500).count(0)
    assert cold > 420 > 300 > hot > 230


@pytest.mark.parametrize(("top_k", "support"), [(1, {1}), (2, {1, 2}), (0, {0, 1, 2, 3})])
def test_top_k_keeps_the_k_largest(top_k: int, support: set[int]):
    assert set(draws(logits_of(0.1, 0.5, 0.3, 0.1), SamplingParams(top_k=top_k, seed=5), 400)) == support


@pytest.mark.parametrize(
    ("top_p", "support"), [(0.5, {1}), (0.51, {1, 2}), (0.8, {1, 2}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, support: set[int]):
    # 1/2, 1/4, 1/8, 1/8 have exact logarithms in base 2 only, so stay clear of the borders
    assert set(draws(logits_of(0.12, 0.505, 0.3, 0.075), SamplingParams(top_p=top_p, seed=5), 600)) == support


def test_a_nucleus_larger_than_the_shortcut_is_whole():
    flat = torch.zeros(1, 5000)
    seen = set(draws(flat, SamplingParams(top_p=0.9, seed=2), 3000))
    assert max(seen) < 4500 + 1
    assert len(seen) > 2000


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10_000),
    company=st.integers(0, 6),
    place=st.integers(0, 6),
    top_p=st.floats(0.1, 1.0),
    top_k=st.integers(0, 50),
)
def test_company_never_changes_a_draw(seed: int, position: int, company: int, place: int, top_p: float, top_k: int):
    generator = torch.Generator().manual_seed(seed % 2**31)
    rows = torch.randn(company + 1, 200, generator=generator)
    mine = min(place, company)
    params = SamplingParams(seed=seed, top_p=top_p, top_k=top_k, logprobs=2)
    others = [SamplingParams(temperature=0.5, seed=i) for i in range(company + 1)]
    others[mine] = params
    positions = list(range(company + 1))
    positions[mine] = position
    together = sample(rows, others, positions)[mine]
    alone = sample(rows[mine : mine + 1], [params], [position])[0]
    assert together.token_id == alone.token_id
    assert together.logprob is not None
    assert alone.logprob is not None
    assert together.logprob.top == alone.logprob.top


def test_an_answer_continued_elsewhere_draws_on_as_if_nothing_happened():
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(seed=42)
    whole = draws(logits, params, 20)
    resumed = [sample(logits, [params], [position])[0].token_id for position in range(7, 20)]
    assert resumed == whole[7:]
    assert draws(logits, SamplingParams(seed=43), 20) != whole


def test_the_uniform_numbers_are_pinned():
    """A change here changes every seeded answer of every user."""
    assert [round(uniform(7, i), 12) for i in range(3)] == [0.87207345482, 0.082842687027, 0.014107696329]


def test_logprobs_are_of_the_raw_distribution():
    drawn = sample(logits_of(0.5, 0.3, 0.2), [SamplingParams(temperature=0, logprobs=2)], [0])[0]
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token for token, _ in drawn.logprob.top] == [0, 1]
    assert drawn.logprob.top[1][1] == pytest.approx(math.log(0.3), abs=1e-6)


def test_logprob_of_the_drawn_token_without_alternatives():
    drawn = sample(logits_of(0.5, 0.5), [SamplingParams(temperature=0, logprobs=0)], [0])[0]
    assert drawn.logprob is not None
    assert drawn.logprob.top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(bad: float):
    with pytest.raises(NonFiniteLogitsError):
        sample(torch.full((1, 4), bad), [GREEDY], [0])


def test_one_bad_row_is_named_and_the_others_are_fine():
    logits = torch.zeros(3, 4)
    logits[1] = float("nan")
    with pytest.raises(NonFiniteLogitsError) as caught:
        sample(logits, [GREEDY] * 3, [0] * 3)
    assert caught.value.rows == (1,)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    for top_p in (1.0, 0.5):
        assert draws(logits_of(0.2, 0.5, 0.3), SamplingParams(temperature=1e-310, top_p=top_p), 5) == [1] * 5


def test_masked_tokens_are_never_drawn():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    assert 1 not in draws(logits, SamplingParams(seed=1), 200)
