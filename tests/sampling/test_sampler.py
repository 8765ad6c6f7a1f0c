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


def test_what_is_cut_leaves_the_proportions_of_the_rest():
    count = 3000
    drawn = draws(logits_of(0.1, 0.4, 0.3, 0.2), SamplingParams(seed=9, top_k=3, top_p=0.7), count)
    expected = {1: 4 / 7, 2: 3 / 7}  # 0.4 and 0.3 of the 0.9 that top_k leaves are 7/9, enough for 0.7
    assert set(drawn) == set(expected)
    assert sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in expected.items()) < 10.8  # 1 degree, p = 0.001


def kept_by_hand(logits: list[float], wish: SamplingParams) -> list[int]:
    """The twin: sort everything, cut, and put back in token order."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: wish.top_k] if wish.top_k else order
    weights = [math.exp((logits[i] - max(logits)) / wish.temperature) for i in order]
    kept, reached = 0, 0.0
    while kept < len(order) and (kept == 0 or reached < wish.top_p * math.fsum(weights) * (1 - 1e-12)):
        reached += weights[kept]
        kept += 1
    return sorted(order if wish.top_p == 1.0 else order[:kept])


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=4, max_size=40),
    keep=st.floats(0, 1.2),
    top_p=st.sampled_from([0.013, 0.31, 0.507, 0.777, 0.93, 0.9999, 1.0]),
    temperature=st.sampled_from([0.07, 0.5, 1.0, 2.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_draws_are_those_of_a_twin_that_sorts(logits: list[float], keep: float, top_p: float, temperature: float, seed: int):
    """Many ties: quarters of an integer."""
    wish = SamplingParams(temperature=temperature, top_k=round(keep * len(logits)), top_p=top_p, seed=seed)
    kept = kept_by_hand(logits, wish)
    row = torch.tensor([logits], dtype=torch.float32)
    for position in range(8):
        left = uniform(seed, position) * math.fsum(math.exp((logits[i] - max(logits)) / temperature) for i in kept)
        for token in kept:
            expected = token
            left -= math.exp((logits[token] - max(logits)) / temperature)
            if left < 0:
                break
        if abs(left) > 1e-9:  # clear of a border between two tokens
            assert sample(row, [wish], [position])[0].token_id == expected


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


@pytest.mark.parametrize("vocab", [1, 333, 50257])
def test_company_changes_no_bit_at_odd_vocabularies_either(vocab: int):
    rows = torch.randn(9, vocab, generator=torch.Generator().manual_seed(1)).mul(4).bfloat16().float()  # with ties
    wishes = [GREEDY, SamplingParams(seed=4), SamplingParams(seed=4, top_p=0.8, logprobs=3)] * 3
    together = sample(rows, wishes, list(range(9)))
    assert together == [sample(rows[i : i + 1], [wishes[i]], [i])[0] for i in range(9)]
    assert together == sample(rows.flip(0), wishes[::-1], list(range(9))[::-1])[::-1]


def test_greedy_ties_go_to_the_first_token_as_in_stock_generate():
    rows = torch.zeros(3, 1000)
    rows[1, 500:] = 1
    rows[2, [7, 999]] = 1
    assert [d.token_id for d in sample(rows, [GREEDY] * 3, [0] * 3)] == [0, 500, 7] == rows.argmax(-1).tolist()


def test_the_largest_uniform_number_reaches_no_token_without_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.sampling.sampler.uniform", lambda seed, position: 1.0)
    logits = torch.tensor([[1.0, 1.0, float("-inf"), float("-inf")]])
    for wish in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.999)):
        assert sample(logits, [wish], [0])[0].token_id == 1


def test_alternatives_of_equal_probability_come_in_token_order():
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])
    drawn = sample(logits, [SamplingParams(temperature=0, logprobs=2)], [0])[0]
    assert drawn.token_id == 1
    assert drawn.logprob is not None
    assert [token for token, _ in drawn.logprob.top] == [1, 2]


def test_alternatives_are_never_more_than_there_are():
    logits = torch.tensor([[0.0, 1.0, float("-inf")]])
    logprob = sample(logits, [SamplingParams(temperature=0, logprobs=20)], [0])[0].logprob
    assert logprob is not None
    assert [token for token, _ in logprob.top] == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(bad: float):
    with pytest.raises(NonFiniteLogitsError):
        sample(torch.full((1, 4), bad), [GREEDY], [0])


def test_one_bad_logit_is_enough_and_its_row_is_named():
    rows = torch.zeros(4, 10)
    rows[1, 3] = float("nan")
    rows[3, 9] = float("inf")
    with pytest.raises(NonFiniteLogitsError) as caught:
        sample(rows, [GREEDY, SamplingParams(), SamplingParams(), GREEDY], [0] * 4)
    assert caught.value.rows == (1, 3)


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
    for wish in (SamplingParams(seed=1), SamplingParams(seed=1, top_k=2), SamplingParams(seed=1, top_p=0.99)):
        assert set(draws(logits, wish, 100)) == {0, 2}
