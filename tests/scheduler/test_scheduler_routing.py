"""Who gets work: estimates, cached prefixes, decode room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_scene import BLOCK_TOKENS, DOC, Scene, keys_of, small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.messages import Tick
from scheduler.plan import SchedulerSettings

OTHER = keys_of("other", 16)


def test_the_second_turn_goes_where_the_first_is_cached() -> None:
    scene = small_cluster(SchedulerSettings(link_bytes_per_s=1e4), nodes=2)
    first = scene.plan("r1", DOC)
    assert (first.cached_blocks, first.prefill_source) == (0, None)
    node = scene.state.fleet.prefill[first.prefill_worker].node_id
    scene.store(node, DOC)
    scene.ended("r1")
    second = scene.plan("r2", (*DOC, *keys_of("more", 2)))
    assert (second.prefill_worker, second.cached_blocks, second.prefill_source) == (first.prefill_worker, 16, None)
    assert second.terms.compute_s < first.terms.compute_s / 4


def test_a_prefix_at_another_node_is_pulled_and_named_with_its_endpoint() -> None:
    scene = small_cluster(nodes=2)
    scene.store("n1", DOC)
    scene.silent.add("p1")
    scene.silent.add("d1")
    scene.beat(4)
    plan = scene.plan("r", DOC)
    assert plan.prefill_worker == "p0"
    assert plan.cached_blocks == len(DOC)
    assert plan.prefill_source is not None
    assert (plan.prefill_source.node_id, plan.prefill_source.endpoint) == ("n1", "tcp://n1/a")


def test_blocks_of_a_silent_node_are_not_counted_on() -> None:
    scene = small_cluster(nodes=2)
    scene.store("n1", DOC)
    scene.silent |= {"n1", "p1", "d1"}
    scene.beat(4)
    assert scene.plan("r", DOC).cached_blocks == 0


def test_decode_is_told_where_prefill_publishes_only_where_nodes_differ() -> None:
    scene = Scene()
    for node_id in ("n0", "n1"):
        scene.node(node_id)
    scene.prefill("p0", "n0")
    scene.decode("d0", "n1")
    scene.beat(3)
    plan = scene.plan("r", DOC)
    assert plan.decode_source is not None
    assert plan.decode_source.node_id == "n0"
    assert small_cluster().plan("r", DOC).decode_source is None


def test_a_burst_within_one_heartbeat_spreads_by_our_own_estimates() -> None:
    scene = small_cluster(prefill=4, decode=4)
    plans = [scene.plan(f"r{i}", keys_of(f"doc{i}", 8)) for i in range(8)]
    for role in ("prefill_worker", "decode_worker"):
        chosen = [getattr(plan, role) for plan in plans]
        assert {chosen.count(worker) for worker in set(chosen)} == {2}
        assert len(set(chosen)) == 4


def test_the_queue_drains_with_the_clock_and_follows_the_report() -> None:
    scene = small_cluster(prefill=1)
    estimate = scene.plan("r1", DOC).terms.compute_s
    assert scene.plan("r2", OTHER).terms.queue_s == pytest.approx(estimate)
    queue = scene.state.fleet.prefill["p0"].queue
    scene.now += 1.0
    assert queue.seconds(scene.now) == pytest.approx(2 * estimate - 1.0)
    scene.workers["p0"].load = PrefillLoad(0, 1, 100)
    scene.beat(3)  # longer than a request may be on its way to the worker
    assert queue.seconds(scene.now) == pytest.approx(queue.speed.seconds(100))


def test_of_two_upper_bounds_of_the_queue_the_smaller_counts() -> None:
    """A worker counts the tokens of a waiting prompt whole, cached ones too; we know how few it will compute."""
    scene = small_cluster(prefill=1)
    scene.store("n0", DOC)
    estimate = scene.plan("r", DOC).terms.compute_s
    scene.workers["p0"].load = PrefillLoad(1, 0, len(DOC) * BLOCK_TOKENS + 10)
    scene.beat(3)
    assert scene.state.fleet.prefill["p0"].queue.seconds(scene.now) == pytest.approx(estimate)


def test_a_report_does_not_hide_what_is_still_on_its_way_to_the_worker() -> None:
    scene = small_cluster(prefill=1)
    scene.plan("r1", DOC)
    scene.workers["p0"].load = PrefillLoad(0, 1, 400)
    scene.beat(3)
    estimate = scene.plan("r2", DOC).terms.compute_s
    scene.beat()
    queue = scene.state.fleet.prefill["p0"].queue
    assert queue.seconds(scene.now) == pytest.approx(queue.speed.seconds(400) + estimate)


def test_what_is_known_of_a_machine_survives_its_worker() -> None:
    scene = small_cluster(prefill=1)
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, tuple((f"x{i}", 0, 1024, 0, 0.1) for i in range(20)))
    scene.beat()
    learned = scene.plan("r", DOC).terms.compute_s
    scene.prefill("p0", incarnation="b")
    scene.beat(2)
    assert scene.plan("s", DOC).terms.compute_s == pytest.approx(learned)


def test_links_are_learned_from_the_nodes_and_forgotten_with_them() -> None:
    scene = small_cluster(nodes=2)
    report = scene.nodes["n0"].report()
    pulls = (("n1", 100_000_000, 10.0),) * 40
    scene.state.handle(replace(report, load=replace(report.load, pulls=pulls)), scene.now)
    here, there = scene.state.index.slot_of("n0"), scene.state.index.slot_of("n1")
    assert scene.state.fleet.links.from_slot(there, 2)[here] == pytest.approx(1e7, rel=0.1)
    scene.silent.add("n1")
    scene.beat(8)
    assert scene.state.fleet.links.from_slot(there, 2)[here] == scene.state.settings.link_bytes_per_s


def test_a_given_up_request_takes_its_estimate_along() -> None:
    scene = small_cluster(prefill=1)
    first = scene.plan("r1", DOC)
    scene.plan("r2", OTHER)
    scene.ended("r1")
    assert scene.state.fleet.prefill["p0"].queue.seconds(scene.now) == pytest.approx(first.terms.compute_s)
    scene.ended("r2")
    assert scene.state.fleet.prefill["p0"].queue.seconds(scene.now) == 0.0


def test_a_restarted_scheduler_believes_a_worker_that_has_more_than_it_knows_of() -> None:
    scene = Scene()
    scene.node("n0")
    scene.prefill("p0").load = PrefillLoad(3, 1, 4000)
    scene.decode("d0").load = DecodeLoad(0, 9, 10, 100, 0.02)
    scene.beat(3)
    assert scene.plan("r").terms.queue_s == pytest.approx(10.0)
    room = scene.state.fleet.decode["d0"].room
    assert (room.sequences, room.blocks) == (9, 10 - 2)


def test_reports_correct_the_speed() -> None:
    scene = small_cluster(prefill=1)
    slow = scene.plan("r", DOC).terms.compute_s
    finished = tuple((f"x{i}", 0, 1024, 0, 0.1) for i in range(20))
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, finished)
    scene.beat()
    scene.ended("r")
    assert scene.plan("r2", DOC).terms.compute_s < slow / 10


def test_a_request_that_would_wait_too_long_is_turned_away_before_any_work() -> None:
    scene = small_cluster(SchedulerSettings(classes=("default=ttft 4s",)), prefill=1)
    scene.plan("r1", DOC)
    rejection = scene.reject("r2", OTHER)
    assert rejection.reason == "overloaded"
    assert 1.0 <= rejection.retry_after_s < 4.0
    assert len(scene.state.assignments) == 1
    scene.now += rejection.retry_after_s + 0.01
    scene.state.handle(Tick(), scene.now)
    scene.plan("r2", OTHER)


def test_decode_room_is_promised_once() -> None:
    scene = Scene()
    scene.node("n0")
    scene.prefill("p0")
    scene.decode("d0", blocks=40)
    scene.beat(3)
    scene.plan("r1", DOC)  # 16 blocks of prompt, a tail, 64 tokens of answer: 18
    scene.plan("r2", DOC)
    rejection = scene.reject("r3", DOC)
    assert (rejection.reason, rejection.detail) == ("overloaded", "no decode worker has room for it")
    scene.plan("r4")
    scene.ended("r1")
    scene.plan("r3", DOC)


def test_few_answers_use_all_of_the_tokens_they_may_have() -> None:
    scene = Scene(SchedulerSettings(expected_output_tokens=128))
    scene.node("n0")
    scene.prefill("p0")
    scene.decode("d0", blocks=20)
    scene.beat(3)
    scene.plan("r", DOC, max_new_tokens=8000)


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    scene = Scene()
    scene.node("n0")
    scene.prefill("p0")
    scene.decode("d0", blocks=1)
    scene.beat(3)
    scene.plan("r", DOC, max_new_tokens=1)
    assert scene.state.fleet.decode["d0"].in_flight == 0


def test_the_report_of_free_blocks_counts_beside_our_own_sum() -> None:
    """Shared prefixes take less than the sum of the charges: the worker's own number then shows more room."""
    scene = Scene()
    scene.node("n0")
    scene.prefill("p0")
    worker = scene.decode("d0", blocks=40)
    scene.beat(3)
    for i in range(2):
        scene.plan(f"r{i}", DOC)
    worker.load = DecodeLoad(0, 2, 22, 40, 0.02)
    scene.beat(3)
    assert scene.state.fleet.decode["d0"].room.blocks == 22 - 2 * 1
    worker.load = DecodeLoad(1, 1, 22, 40, 0.02)  # the newer one waits there: it has no blocks yet
    scene.beat()
    assert scene.state.fleet.decode["d0"].room.blocks == max(22 - 1 - 18, 40 - 2 * 18)


def test_one_on_its_way_is_not_taken_for_one_that_has_its_blocks() -> None:
    scene = Scene()
    scene.node("n0")
    scene.prefill("p0")
    worker = scene.decode("d0", blocks=40)
    scene.beat(3)
    worker.load = DecodeLoad(0, 1, 30, 40, 0.02)  # one that we do not know of
    scene.plan("r", DOC)
    worker.load = DecodeLoad(0, 2, 30, 40, 0.02)
    scene.beat()
    assert scene.state.fleet.decode["d0"].room.blocks == 30 - 18, "younger than a report: its blocks may not be taken yet"
    scene.beat(2)
    assert scene.state.fleet.decode["d0"].room.blocks == 30 - 1
    scene.ended("r")
    assert scene.state.fleet.decode["d0"].room.blocks == 30, "what was kept for its growth"
