"""How long a decode step takes, from steps that were measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.serving.step_time import CONTEXT_TOKENS_MAX, SEQUENCES_MAX, STEP_MAX_S, STEP_MIN_S, StepTime


def truth(sequences: int, context: int) -> float:
    return 0.02 + 0.0005 * sequences + 4e-8 * context


def test_starts_from_the_guess_whatever_the_batch():
    assert StepTime(0.03).seconds(1, 0) == StepTime(0.03).seconds(64, 100_000) == 0.03


def test_learns_all_three_from_batches_that_differ():
    step, draw = StepTime(0.1), random.Random(1)
    for _ in range(400):
        sequences = draw.randrange(1, 65)
        context = sequences * draw.randrange(200, 20_000)
        step.observe(sequences, context, truth(sequences, context) * draw.uniform(0.95, 1.05))
    for sequences, context in ((1, 500), (32, 100_000), (64, 800_000), (8, 8)):
        assert step.seconds(sequences, context) == pytest.approx(truth(sequences, context), rel=0.05)


def test_a_batch_that_never_changes_is_predicted_and_the_rest_stays_sane():
    step = StepTime(0.03)
    for _ in range(100):
        step.observe(4, 4000, 0.05)
    assert step.seconds(4, 4000) == pytest.approx(0.05, rel=0.02)
    assert 0.0 < step.seconds(1, 1000) <= 0.06
    assert step.seconds(8, 8000) < 0.2


def test_one_absurd_step_is_not_believed_whole():
    step = StepTime(0.03)
    for _ in range(100):
        step.observe(4, 4000, 0.05)
    step.observe(4, 4000, 1000.0)
    assert step.seconds(4, 4000) < 0.08


@given(st.lists(st.tuples(st.integers(-1, 300), st.integers(-1, 10**7), st.floats(-1, 1e4)), max_size=60))
def test_never_negative_and_never_shrinking_with_the_batch(steps: list[tuple[int, int, float]]):
    step = StepTime(0.03)
    for each in steps:
        step.observe(*each)
    base, per_sequence, per_token = step.coefficients
    assert min(base, per_sequence, per_token) >= 0.0
    assert 0.0 <= step.seconds(4, 1000) <= step.seconds(5, 1000) <= step.seconds(5, 2000)


def test_a_step_without_context_after_steps_that_only_context_explains():
    step, draw = StepTime(0.03), random.Random(3)
    for _ in range(300):
        sequences = draw.randrange(1, 40)
        context = sequences * draw.randrange(100, 20_000)
        step.observe(sequences, context, context * 1e-7)
    step.observe(1, 0, 0.01)
    assert step.seconds(1, 0) >= 0.0


@pytest.mark.parametrize(
    ("sequences", "context", "seconds"),
    [
        (0, 10, 0.1), (SEQUENCES_MAX + 1, 10, 0.1), (1, -1, 0.1), (1, CONTEXT_TOKENS_MAX + 1, 0.1), (1, 10**30, 0.1),
        (1, 10, 0.0), (1, 10, -1.0), (1, 10, float("nan")), (1, 10, float("inf")), (1, 10, STEP_MAX_S * 2),
    ],
)  # fmt: skip
def test_what_cannot_have_been_measured_is_not_learned(sequences: int, context: int, seconds: float):
    step = StepTime(0.03)
    step.observe(sequences, context, seconds)
    assert step.observed == 0
    assert step.seconds(4, 1000) == 0.03


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, SEQUENCES_MAX]), st.sampled_from([0, 1, CONTEXT_TOKENS_MAX]),
                  st.sampled_from([STEP_MIN_S, 0.01, STEP_MAX_S])),
        max_size=80,
    )
)  # fmt: skip
def test_the_bounds_themselves_are_taken(steps: list[tuple[int, int, float]]):
    step = StepTime(0.0)
    for each in steps:
        step.observe(*each)
    assert all(0.0 <= value < float("inf") for value in step.coefficients)
