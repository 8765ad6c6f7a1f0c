"""The write budget against a list of all charges: no window of 24 hours ever holds more than the budget."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kv_pool.ssd.budget import BUCKET_S, WINDOW_S, WriteBudget
from kv_pool.ssd.records import SsdFormatError

NOW = 1_790_000_000.0
BUDGET = 1000

steps = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 299.0, 300.0, 4000.0, 30_000.0, 86_400.0, 90_000.0]), st.integers(0, 700)),
    max_size=60,
)


@given(steps)
def test_no_window_of_24_hours_holds_more_than_the_budget(steps: list[tuple[float, int]]) -> None:
    budget, now, booked = WriteBudget(BUDGET), NOW, list[tuple[float, int]]()
    for seconds, wish in steps:
        now += seconds
        count = min(wish, budget.left(now))
        budget.charge(count, now)
        booked.append((now, count))
        within = sum(c for at, c in booked if at > now - WINDOW_S)
        with_bucket = sum(c for at, c in booked if at > now - WINDOW_S - BUCKET_S)
        assert within <= budget.spent(now) <= with_bucket
        assert budget.left(now) == BUDGET - budget.spent(now)
    for start, _ in booked:
        assert sum(count for at, count in booked if start <= at < start + WINDOW_S) <= BUDGET


@given(steps, st.integers(0, 40))
def test_history_survives_a_restart(steps: list[tuple[float, int]], restart: int) -> None:
    steady, restarted, now = WriteBudget(BUDGET), WriteBudget(BUDGET), NOW
    for number, (seconds, count) in enumerate(steps):
        now += seconds
        if number == restart:
            restarted = WriteBudget.unpack(restarted.pack(), BUDGET)
        steady.charge(count, now)
        restarted.charge(count, now)
        assert steady.spent(now) == restarted.spent(now)


def test_everything_is_left_again_after_a_day_and_not_before() -> None:
    budget = WriteBudget(BUDGET)
    budget.charge(900, NOW)
    assert budget.left(NOW + WINDOW_S - 1) == 100
    assert budget.left(NOW + WINDOW_S + BUCKET_S) == BUDGET


def test_a_correction_gives_back_where_it_was_booked_and_books_more_now() -> None:
    budget = WriteBudget(BUDGET)
    budget.charge(500, NOW)
    budget.correct(500, 200, NOW, NOW + 4000)
    assert budget.spent(NOW + 4000) == 200
    assert budget.spent(NOW + WINDOW_S + BUCKET_S) == 0, "nothing negative is left behind"
    budget.charge(100, NOW + 2 * WINDOW_S)
    budget.correct(100, 150, NOW + 2 * WINDOW_S, NOW + 2 * WINDOW_S + 4000)
    assert budget.spent(NOW + 3 * WINDOW_S + BUCKET_S) == 50
    budget.correct(100, 0, NOW, NOW + 3 * WINDOW_S)
    assert budget.spent(NOW + 3 * WINDOW_S) == 50, "what was booked so long ago is forgotten already"


def test_a_clock_that_is_set_back_forgives_nothing_and_stops_nothing_for_good() -> None:
    budget = WriteBudget(BUDGET)
    budget.charge(600, NOW)
    assert budget.left(NOW - 3600) == 400
    year = 365 * 86_400
    budget.charge(300, NOW + year)
    assert budget.left(NOW) == 700, "back from a year ahead, with what was booked there"
    assert budget.left(NOW + WINDOW_S + BUCKET_S) == BUDGET


def test_a_restored_history_counts_once_and_adds_what_was_not_known() -> None:
    budget = WriteBudget(BUDGET)
    budget.charge(100, NOW)
    saved = budget.pack()
    budget.charge(50, NOW + 1)
    budget.restore(saved)
    assert budget.spent(NOW + 1) == 150
    other = WriteBudget(BUDGET)
    other.charge(7, NOW + 3600)
    other.restore(saved)
    assert other.spent(NOW + 3600) == 107
    other.restore(WriteBudget(BUDGET).pack())
    assert other.spent(NOW + 3600) == 107
    assert WriteBudget.unpack(saved, 50).left(NOW) == 0, "the history may be more than a lower budget"


@pytest.mark.parametrize("packed", [b"", b"x" * 7, WriteBudget(1).pack() + b"\0", WriteBudget(1).pack()[:-1]])
def test_what_is_no_history_is_refused(packed: bytes) -> None:
    with pytest.raises(SsdFormatError):
        WriteBudget(BUDGET).restore(packed)


def test_impossible_amounts_are_refused() -> None:
    with pytest.raises(ValueError):
        WriteBudget(-1)
    with pytest.raises(ValueError):
        WriteBudget(1).charge(-1, NOW)
