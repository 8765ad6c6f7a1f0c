"""The learned numbers behind a routing decision: speeds of prefill, links and loads, and who is busy sending."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.links import SOURCES_MAX, SPEED_MAX, SPEED_MIN, LinkSpeeds
from scheduler.routing.load_speed import PER_BYTE_MAX, PER_BYTE_MIN, LoadSpeeds
from scheduler.routing.prefill_speed import SURPRISE_MAX, PrefillSpeed
from scheduler.routing.senders import WAIT_MAX_S, Senders

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
        links.observe(0, 1, 10_000_000, 0.1)
    assert links.from_slot(0, 3).tolist() == [1e9, pytest.approx(1e8, rel=0.05), 1e9]
    assert links.from_slot(1, 3).tolist() == [1e9, 1e9, 1e9]
    assert links.out(2).tolist() == [pytest.approx(1e8, rel=0.05), 1e9]
    links.forget(1)
    assert links.from_slot(0, 3)[1] == 1e9
    links.forget(0)
    assert links.out(1)[0] == 1e9


def test_links_ignore_what_tells_nothing_and_stay_within_bounds() -> None:
    links = LinkSpeeds(1e9)
    for size, seconds in [(10, 5.0), (1_000_000, 0.0), (1_000_000, math.inf), (1_000_000, math.nan)]:
        links.observe(0, 1, size, seconds)
    links.observe(-1, 1, 1_000_000, 1.0)
    links.observe(0, -1, 1_000_000, 1.0)
    assert links.from_slot(0, 2)[1] == 1e9
    links.observe(0, 1, 100_000, 1e12)
    links.observe(2, 1, 10**18, 1e-9)
    assert links.from_slot(0, 2)[1] == SPEED_MIN
    assert 1e9 <= links.from_slot(2, 2)[1] <= SPEED_MAX
    for source in range(SOURCES_MAX + 10):
        links.observe(source, 0, 1_000_000, 1.0)
    assert links.from_slot(SOURCES_MAX + 9, 1)[0] == 1e9


def test_senders_are_busy_until_what_was_asked_of_them_is_sent() -> None:
    senders = Senders()
    senders.sends(2, 3.0, now=10.0)
    senders.sends(2, 2.0, now=11.0)
    assert senders.wait_s(11.0, 4).tolist() == [0.0, 0.0, 4.0, 0.0]
    assert senders.wait_s(20.0, 4).tolist() == [0.0] * 4
    senders.sends(100, 1e9, now=20.0)
    assert senders.wait_s(20.0, 101)[100] == WAIT_MAX_S
    senders.forget(100)
    assert senders.wait_s(20.0, 101)[100] == 0.0


def test_load_speeds_are_learned_by_medium_from_loads_that_mix_them() -> None:
    truth, draw = (1 / 3e9, 1 / 5e8, 1 / 2e9, 1 / 4e8), random.Random(3)
    speeds = LoadSpeeds()
    for _ in range(2000):
        sizes = [draw.choice([0, 10**7, 10**8]) for _ in range(4)]
        seconds = sum(size * each for size, each in zip(sizes, truth, strict=True))
        speeds.observe(*sizes, seconds * draw.uniform(0.9, 1.1))
    assert speeds.per_byte == pytest.approx(truth, rel=0.15)


@given(st.lists(st.tuples(*[st.integers(-1, 10**12)] * 4, st.floats(-1, 1e9)), max_size=40))
def test_load_speeds_stay_positive_and_finite(loads: list[tuple[int, int, int, int, float]]) -> None:
    speeds = LoadSpeeds()
    for load in loads:
        speeds.observe(*load)
    assert all(PER_BYTE_MIN <= each <= PER_BYTE_MAX for each in speeds.per_byte)
    assert speeds.seconds(10**9, 0, 0, 0) > 0
