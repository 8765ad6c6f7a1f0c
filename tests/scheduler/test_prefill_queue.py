"""How much work a prefill worker has left, from what was planned and what it reports."""

from __future__ import annotations

import pytest

from prefill_worker.task import PrefillLoad
from scheduler.prefill_queue import PrefillQueue


def make_queue(prompts: int, seconds: float) -> PrefillQueue:
    queue = PrefillQueue(1000.0)
    for i in range(100):
        queue.speed.observe(1000 * (1 + i % 30), 0, 0.1 * (1 + i % 30) + 0.001 * (1 + i % 30) ** 2)
    for i in range(prompts):
        queue.assign((f"r{i}", 0), seconds, float(i), 0.0)
    return queue


def test_a_restarted_scheduler_takes_a_long_queue_for_many_prompts_not_for_one():
    """Of a prompt's time a part grows with its square: 64 of 30,000 tokens are not one of 1,920,000."""
    queue = make_queue(0, 0.0)
    queue.report(PrefillLoad(60, 4, 64 * 30_000), 10.0)
    assert queue.seconds(10.0) == pytest.approx(64 * queue.speed.seconds(30_000))


def test_of_two_bounds_the_lower_counts_where_all_that_is_there_is_known():
    queue = make_queue(8, 4.0)
    queue.report(PrefillLoad(4, 4, 8 * 30_000), 10.0)
    assert queue.seconds(10.0) == pytest.approx(min(32.0, 8 * queue.speed.seconds(30_000)))
    queue.report(PrefillLoad(1, 4, 1000, (("r0", 0, 30_000, 0, 4.0),)), 11.0)
    assert queue.seconds(11.0) == pytest.approx(5 * queue.speed.seconds(200))


def test_a_report_may_not_show_yet_what_was_planned_just_now():
    queue = make_queue(1, 4.0)
    queue.report(PrefillLoad(0, 0, 0), 0.5)
    assert queue.seconds(0.5) == pytest.approx(4.0)
    queue.report(PrefillLoad(0, 0, 0), 5.0)
    assert queue.seconds(5.0) == 0.0
