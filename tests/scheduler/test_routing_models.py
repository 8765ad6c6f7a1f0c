"""The two learned numbers behind a routing decision: prefill speed and link speed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.links import LINKS_MAX, SPEED_MAX, SPEED_MIN, LinkSpeeds
from scheduler.routing.prefill_speed import SURPRISE_MAX, PrefillSpeed

TOKENS_PER_S = 400.0


def truth(tokens: int, past: int, a: float = 2e-3, b: float = 4e-7) -> float:
    return tokens * (a + b * (tokens + 2 * past))


def test_starts_from_the_guess() -> None:
    assert PrefillSpeed(TOKENS_PER_S).seconds(800) == pytest.approx(2.0)
    assert PrefillSpeed(TOKENS_PER_S).seconds(800, past=10_000) == pytest.approx(2.0)


def test_one_report_already_moves_the_prediction_most_of_the_way() -> None:
    speed = PrefillSpeed(TOKENS_PER_S)
    for _ in range(2):
        speed.observe(1024, 0, 1024 / 4000)
    assert 3 * speed.seconds(1024) < 2 * PrefillSpeed(TOKENS_PER_S).seconds(1024)


def test_learns_the_slope_from_prompts_at_different_positions() -> None:
    """Lengths 64 to 8,192, noise of 10 %: predicted within 15 % after 60 reports, at lengths and positions not seen too."""
    draw = random.Random(7)
    speed = PrefillSpeed(TOKENS_PER_S)
    for _ in range(60):
        tokens, past = draw.choice([64, 256, 1024, 4096, 8192]), draw.choice([0, 512, 2048])
        speed.observe(tokens, past, truth(tokens, past) * draw.uniform(0.9, 1.1))
    for tokens, past in [(512, 0), (2048, 0), (6000, 0), (300, 4000), (2000, 2000)]:
        assert speed.seconds(tokens, past) == pytest.approx(truth(tokens, past), rel=0.15)


def test_follows_a_machine_that_became_slower() -> None:
    speed = PrefillSpeed(TOKENS_PER_S)
    for factor in (1.0, 3.0):
        for _ in range(60):
            speed.observe(1024, 0, factor * truth(1024, 0))
    assert speed.seconds(1024) == pytest.approx(3 * truth(1024, 0), rel=0.1)


def test_one_absurd_report_is_not_believed_whole() -> None:
    speed = PrefillSpeed(TOKENS_PER_S)
    for _ in range(40):
        speed.observe(1024, 0, truth(1024, 0))
    before = speed.seconds(1024)
    speed.observe(1024, 0, 1e6)
    assert speed.seconds(1024) < before * (1 + SURPRISE_MAX * 0.06)


@pytest.mark.parametrize("report", [(0, 0, 1.0), (-5, 0, 1.0), (10, -1, 1.0), (10, 0, 0.0), (10, 0, -1.0), (10, 0, math.inf)])
def test_what_cannot_be_is_ignored(report: tuple[int, int, float]) -> None:
    speed = PrefillSpeed(TOKENS_PER_S)
    speed.observe(*report)
    assert (speed.observed, speed.seconds(400)) == (0, pytest.approx(1.0))


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-6, 1e5)), max_size=50))
def test_predictions_stay_positive_finite_and_growing(reports: list[tuple[int, int, float]]) -> None:
    speed = PrefillSpeed(TOKENS_PER_S)
    for report in reports:
        speed.observe(*report)
    predictions = [speed.seconds(tokens, past) for past in (0, 5000) for tokens in (1, 100, 10_000)]
    assert all(0 < p < math.inf for p in predictions)
    assert predictions[:3] == sorted(predictions[:3])
    assert speed.seconds(1000, 5000) >= speed.seconds(1000, 0)


def test_links_start_from_the_guess_and_are_learned_each_for_itself() -> None:
    links = LinkSpeeds(1e9)
    for _ in range(40):
        links.observe("n0", "n1", 10_000_000, 0.1)
    assert links.bytes_per_s("n0", "n1") == pytest.approx(1e8, rel=0.05)
    assert links.bytes_per_s("n1", "n0") == 1e9
    links.forget("n1")
    assert links.bytes_per_s("n0", "n1") == 1e9


def test_links_ignore_what_tells_nothing_and_stay_within_bounds() -> None:
    links = LinkSpeeds(1e9)
    for size, seconds in [(10, 5.0), (1_000_000, 0.0), (1_000_000, math.inf), (1_000_000, math.nan)]:
        links.observe("n0", "n1", size, seconds)
    assert links.bytes_per_s("n0", "n1") == 1e9
    links.observe("n0", "n1", 100_000, 1e12)
    links.observe("n2", "n1", 10**18, 1e-9)
    assert links.bytes_per_s("n0", "n1") == SPEED_MIN
    assert 1e9 <= links.bytes_per_s("n2", "n1") <= SPEED_MAX
    for i in range(LINKS_MAX + 10):
        links.observe(f"s{i}", "t", 1_000_000, 1.0)
    assert links.bytes_per_s(f"s{LINKS_MAX + 9}", "t") == 1e9
