"""A request stops counting, whatever is lost on the way."""

from __future__ import annotations

from scheduler_scene import BEAT_S, DOC, loads, small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.assignments import LOST_AFTER_S
from scheduler.plan import SchedulerSettings


def test_parts_end_as_the_workers_report_them() -> None:
    scene = small_cluster(prefill=1, decode=1)
    scene.plan("r", DOC)
    assert loads(scene) == {"p0": 1, "d0": 1}
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, (("r", 0, 1034, 0, 1.0),))
    scene.workers["d0"].load = DecodeLoad(0, 1, 900, 1000, 0.02)
    scene.beat()
    assert loads(scene) == {"p0": 0, "d0": 1}
    scene.workers["d0"].load = DecodeLoad(0, 0, 1000, 1000, 0.02, (("r", 0),))
    scene.beat()
    assert loads(scene) == {"p0": 0, "d0": 0}
    assert len(scene.state.assignments) == 0


def test_ends_of_other_attempts_change_nothing() -> None:
    scene = small_cluster(prefill=1, decode=1)
    scene.plan("r", DOC, attempt=1)
    scene.ended("r", attempt=0)
    scene.ended("stranger")
    assert loads(scene) == {"p0": 1, "d0": 1}


def test_a_newer_attempt_replaces_the_older_and_an_older_one_is_refused() -> None:
    scene = small_cluster()
    scene.plan("r", DOC, attempt=0)
    plan = scene.plan("r", DOC, attempt=1, avoid=("p0", "d0"))
    assert (plan.prefill_worker, plan.decode_worker) == ("p1", "d1")
    assert sum(loads(scene).values()) == 2
    scene.ended("r", attempt=0)
    assert sum(loads(scene).values()) == 2
    assert scene.reject("r", DOC, attempt=0).detail == "a later attempt is under way"


def test_avoid_is_kept_even_where_nobody_else_is_left() -> None:
    assert small_cluster(prefill=1).reject("r", avoid=("p0",)).reason == "no_worker"


def test_a_request_of_which_nothing_is_heard_stops_counting_at_its_deadline() -> None:
    scene = small_cluster(SchedulerSettings(request_life_s=60.0), prefill=1, decode=1)
    scene.workers["p0"].load = PrefillLoad(1, 0, 1000)
    scene.workers["d0"].load = DecodeLoad(1, 0, 900, 1000, 0.0)
    scene.plan("r", DOC)
    scene.beat(119)
    assert loads(scene) == {"p0": 1, "d0": 1}
    scene.beat(2)
    assert loads(scene) == {"p0": 0, "d0": 0}


def test_what_an_idle_worker_does_not_know_is_lost() -> None:
    """The report of its end was lost, or the gateway died before it submitted."""
    scene = small_cluster(prefill=1, decode=1)
    scene.workers["d0"].load = DecodeLoad(0, 1, 900, 1000, 0.02)
    scene.plan("r", DOC)
    scene.beat(int(LOST_AFTER_S / BEAT_S) - 1)
    assert loads(scene) == {"p0": 1, "d0": 1}
    scene.beat(2)
    assert loads(scene) == {"p0": 0, "d0": 1}, "decode goes on"
    scene.workers["d0"].load = DecodeLoad(0, 0, 1000, 1000, 0.02)
    scene.beat()
    assert loads(scene) == {"p0": 0, "d0": 0}
