"""Predicted against actual times to first token, whoever tells first that a request is over."""

from __future__ import annotations

import math

import pytest
from scheduler_scene import small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.messages import RequestEnded
from scheduler.truth import AWAITED_MAX, KEPT, Planned, PredictionLog


def log_of(*pairs: tuple[float, float | None]) -> PredictionLog:
    log = PredictionLog()
    for i, (predicted, actual) in enumerate(pairs):
        log.planned((f"r{i}", 0), Planned(predicted, "chat"))
        log.ended((f"r{i}", 0), actual)
    return log


def test_errors_are_relative_to_what_happened():
    log = log_of((1.0, 2.0), (3.0, 2.0), (2.0, 2.0), (1.0, None), (1.0, math.inf), (1.0, -1.0))
    assert log.errors() == [0.5, 0.5, 0.0]
    assert log.view() == {"count": 3, "error_p50": 0.5, "error_p90": pytest.approx(0.5)}
    assert log_of().view() == {"count": 0, "error_p50": None, "error_p90": None}
    assert log_of((1.0, 0.0)).errors() == [1000.0]


def test_the_truth_is_told_once_and_only_of_what_was_planned():
    log = PredictionLog()
    assert log.ended(("stranger", 0), 1.0) is None
    log.planned(("r", 1), Planned(1.0, "chat"))
    assert log.ended(("r", 0), 1.0) is None
    assert log.ended(("r", 1), 1.0) == Planned(1.0, "chat")
    assert log.ended(("r", 1), 1.0) is None
    assert log.count == 1


def test_it_is_bounded():
    log = PredictionLog()
    for i in range(AWAITED_MAX + 1):
        log.planned((f"r{i}", 0), Planned(1.0, "chat"))
    assert log.ended(("r0", 0), 1.0) is None
    for i in range(1, KEPT + 2):
        assert log.ended((f"r{i}", 0), 1.0) is not None
    assert len(log.errors()) == KEPT
    assert log.count == KEPT + 1


@pytest.mark.parametrize("workers_first", [False, True])
def test_it_is_taken_whether_the_workers_or_the_gateway_tell_first(workers_first: bool):
    scene = small_cluster()
    plan = scene.plan("r", max_new_tokens=8)

    def workers_tell() -> None:
        scene.workers[plan.prefill_worker].load = PrefillLoad(0, 0, 0, finished=(("r", 0, 10, 0, 0.1),))
        scene.workers[plan.decode_worker].load = DecodeLoad(0, 0, 1000, 1000, 0.0, finished=(("r", 0),))
        scene.beat()

    if workers_first:
        workers_tell()
        assert not len(scene.state.assignments)
    before = scene.state.lengths.expected("default", 4096)
    scene.state.handle(RequestEnded("r", 0, 0.5, 8), scene.now)
    assert scene.state.view(scene.now)["prediction"]["count"] == 1
    assert scene.state.lengths.expected("default", 4096) < before
