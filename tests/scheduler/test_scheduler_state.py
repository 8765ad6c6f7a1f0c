"""The scheduler's state through its two doors: who gets work, when it stops counting, and what failures cost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_scene import BEAT_S, BLOCK_TOKENS, Scene, keys_of, small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.assignments import LOST_AFTER_S
from scheduler.blame import BLAMES_MAX, REQUESTS_MAX, BlameLedger
from scheduler.members import QUARANTINE_FIRST_S, QUARANTINE_MAX_S, RAMP_S, Quarantine
from scheduler.messages import Follow, Notice, Reply, SnapshotFailed, Tick, Unfollow
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.snapshots import FETCH_LOST_S, SnapshotSchedule
from scheduler.state import STALL_S

DOC = keys_of("doc", 16)


def notices(actions: list[object]) -> list[tuple[str, str]]:
    return [(a.kind, a.worker_id) for a in actions if isinstance(a, Notice)]


# --- joining -----------------------------------------------------------------------------------------------------------


def test_a_worker_gets_work_once_it_has_heard_of_its_node() -> None:
    scene = Scene()
    scene.prefill("p0")
    scene.decode("d0")
    assert notices(scene.beat()) == [("up", "p0"), ("up", "d0")]
    assert scene.standing("p0") == "joining"
    node = scene.node("n0")
    scene.beat()
    reply = scene.workers["p0"].hear(scene.state.handle(scene.workers["p0"].report(), scene.now))
    assert reply == Reply(0, f"tcp://n0/{node.incarnation}", "a")
    assert scene.reject("r").reason == "no_worker"
    scene.beat()
    assert scene.standing("p0") == scene.standing("d0") == "live"
    assert scene.plan("r").prefill_worker == "p0"


def test_no_workers_at_all() -> None:
    rejection = Scene().reject("r")
    assert (rejection.reason, rejection.request_id, rejection.attempt) == ("no_worker", "r", 0)
    assert rejection.retry_after_s > 0


def test_a_prefill_worker_alone_is_not_enough() -> None:
    assert small_cluster(decode=0).reject("r").detail == "no decode worker may take it now"


# --- prefixes and estimates --------------------------------------------------------------------------------------------


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
    assert scene.plan("r2", DOC).terms.queue_s == pytest.approx(estimate)
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
    assert scene.state.links.bytes_per_s("n1", "n0") == pytest.approx(1e7, rel=0.1)
    scene.silent.add("n1")
    scene.beat(8)
    assert scene.state.links.bytes_per_s("n1", "n0") == scene.state.settings.link_bytes_per_s


def test_a_given_up_request_takes_its_estimate_along() -> None:
    scene = small_cluster(prefill=1)
    first = scene.plan("r1", DOC)
    scene.plan("r2", DOC)
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
    scene = small_cluster(SchedulerSettings(ttft_max_s=4.0), prefill=1)
    scene.plan("r1", DOC)
    rejection = scene.reject("r2", DOC)
    assert rejection.reason == "overloaded"
    assert 1.0 <= rejection.retry_after_s < 4.0
    assert len(scene.state.assignments) == 1
    scene.now += rejection.retry_after_s + 0.01
    scene.state.handle(Tick(), scene.now)
    scene.plan("r2", DOC)


# --- decode room -------------------------------------------------------------------------------------------------------


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


# --- ends of requests --------------------------------------------------------------------------------------------------


def loads(scene: Scene) -> dict[str, int]:
    return {worker.id: worker.in_flight for worker in scene.state.fleet.workers()}


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


# --- silence, death, return --------------------------------------------------------------------------------------------


def test_a_silent_worker_gets_no_work_then_is_given_up() -> None:
    scene = small_cluster()
    plan = scene.plan("r", DOC)
    scene.silent.add("p0")
    assert notices(scene.beat(3)) == []
    scene.now += 0.1
    assert scene.standing("p0") == "suspect"
    assert scene.plan("s", DOC).prefill_worker == "p1"
    assert plan.prefill_worker == "p0"
    assert notices(scene.beat(4)) == [("down", "p0")]
    assert scene.standing("p0") == "dead"
    assert loads(scene)["p0"] == 0
    assert sum(loads(scene).values()) == 2, "its request is over at its decode worker too"


def test_decode_of_a_request_goes_on_when_its_prefill_worker_dies_afterwards() -> None:
    scene = small_cluster(prefill=1, decode=1)
    scene.plan("r", DOC)
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, (("r", 0, 1034, 0, 1.0),))
    scene.workers["d0"].load = DecodeLoad(0, 1, 900, 1000, 0.02)
    scene.beat()
    scene.silent.add("p0")
    assert notices(scene.beat(8)) == [("down", "p0")]
    assert loads(scene)["d0"] == 1


def test_one_that_speaks_again_hears_the_fence_and_gets_work_once_it_obeys() -> None:
    scene = small_cluster()
    scene.silent.add("p0")
    scene.beat(8)
    worker = scene.workers["p0"]
    worker.obedient = False
    scene.silent.clear()
    scene.beat(2)
    assert scene.standing("p0") == "fenced"
    assert worker.hear(scene.state.handle(worker.report(), scene.now)).fence == 1
    assert {scene.plan(f"r{i}", DOC).prefill_worker for i in range(4)} == {"p1"}
    worker.obedient = True
    scene.beat()
    assert notices(scene.beat()) == [("up", "p0")]
    assert scene.standing("p0") == "live"


def test_one_that_came_back_is_ramped_up() -> None:
    scene = small_cluster(SchedulerSettings(ttft_max_s=1e6))
    scene.silent.add("p0")
    scene.beat(8)
    scene.silent.clear()
    scene.beat(3)
    chosen = [scene.plan(f"r{i}", DOC).prefill_worker for i in range(8)]
    assert chosen.count("p0") == 1
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, (("r0", 0, 1034, 0, 2.5),))
    scene.workers["p1"].load = PrefillLoad(9, 0, 100_000)
    scene.beat()
    assert [scene.plan(f"s{i}", DOC).prefill_worker for i in range(6)].count("p0") == 3
    scene.workers["p0"].load = PrefillLoad(1, 0, 100)
    scene.beat(int(RAMP_S / BEAT_S) + 1)
    assert [scene.plan(f"t{i}", DOC).prefill_worker for i in range(6)].count("p0") == 6


def test_where_all_are_being_ramped_up_they_get_it_all() -> None:
    scene = small_cluster(prefill=1, decode=1)
    scene.silent |= {"p0", "d0"}
    scene.beat(8)
    scene.silent.clear()
    scene.beat(3)
    for i in range(4):
        scene.plan(f"r{i}")


def test_a_restarted_worker_is_another_and_the_old_process_is_not_heard_again() -> None:
    scene = small_cluster()
    assert scene.plan("r", DOC).prefill_worker == "p0"
    old = scene.workers["p0"]
    new = scene.prefill("p0", incarnation="b")
    assert notices(scene.beat()) == [("down", "p0"), ("up", "p0")]
    assert loads(scene)["p0"] == 0
    assert scene.standing("p0") == "joining"
    scene.beat()
    assert scene.standing("p0") == "live"
    actions = scene.state.handle(replace(old.report(), load=PrefillLoad(9, 9, 9999)), scene.now)
    assert actions == [Reply(1)], "fenced, and without a place"
    assert scene.state.fleet.prefill["p0"].incarnation == new.incarnation
    assert scene.state.fleet.prefill["p0"].queue.seconds(scene.now) == 0.0


def test_a_frozen_process_does_not_take_the_place_of_the_one_that_replaced_it() -> None:
    scene = small_cluster()
    old = scene.workers["p0"]
    scene.silent.add("p0")
    scene.beat(8)
    scene.silent.clear()
    scene.prefill("p0", incarnation="b")
    scene.beat(2)
    scene.state.handle(old.report(), scene.now)
    assert scene.state.fleet.prefill["p0"].incarnation == "b"
    scene.silent.add("p0")
    scene.beat(8)  # the replacement dies too: now whoever speaks may have the name
    scene.state.handle(old.report(), scene.now)
    assert scene.state.fleet.prefill["p0"].incarnation == old.incarnation


def test_a_stall_of_the_scheduler_itself_kills_nobody() -> None:
    scene = small_cluster()
    scene.plan("r", DOC)
    scene.now += 60.0
    assert scene.state.handle(Tick(), scene.now) == []
    assert scene.standing("p0") == "live"
    scene.now += STALL_S / 2
    assert scene.state.handle(Tick(), scene.now) == []
    assert sum(loads(scene).values()) == 2


# --- nodes -------------------------------------------------------------------------------------------------------------


def test_workers_of_a_silent_node_get_no_work() -> None:
    scene = small_cluster(nodes=2)
    scene.store("n0", DOC)
    scene.silent.add("n0")
    scene.beat(4)
    assert scene.standing("p0") == "suspect"
    assert {scene.plan(f"r{i}").prefill_worker for i in range(3)} == {"p1"}
    assert Unfollow("tcp://n0/events") in scene.beat(4)
    assert scene.standing("p0") == "joining"
    assert scene.state.index.entries == 0
    scene.silent.clear()
    assert Follow("tcp://n0/events") in scene.beat()
    scene.beat(2)
    assert scene.standing("p0") == "live"


def test_a_restarted_node_is_purged_and_its_workers_wait_until_they_know_of_it() -> None:
    scene = small_cluster(nodes=2)
    scene.store("n0", DOC)
    scene.node("n0", incarnation="b")
    assert [a for a in scene.beat() if isinstance(a, Follow | Unfollow)] == [
        Unfollow("tcp://n0/events"),
        Follow("tcp://n0/events"),
    ]
    assert scene.state.index.longest_prefix(DOC) == {}
    assert scene.standing("p0") == "joining"
    scene.beat()
    assert scene.standing("p0") == "live"
    chosen = [scene.plan(f"r{i}", keys_of(f"doc{i}", 8)).prefill_worker for i in range(6)]
    assert chosen.count("p0") == 1, "nothing is cached there: it is ramped up"


def test_events_lost_behind_the_last_heartbeat_are_found_without_another_event() -> None:
    scene = small_cluster(nodes=1)
    scene.nodes["n0"].stored(DOC)  # published, never arrived
    scene.beat(3)
    assert scene.state.index.longest_prefix(DOC) == {"n0": len(DOC)}


def test_a_node_that_gives_no_snapshot_is_asked_ever_more_seldom() -> None:
    scene = small_cluster(nodes=1)
    scene.nodes["n0"].stored(DOC)
    asked: list[float] = []
    scene.nodes["n0"].snapshot = lambda: pytest.fail("not asked here")  # type: ignore[method-assign,assignment]
    for _ in range(120):
        scene.now += BEAT_S
        for event in (scene.nodes["n0"].report(), Tick()):
            for action in scene.state.handle(event, scene.now):
                if type(action).__name__ == "FetchSnapshot":
                    asked.append(scene.now)
                    scene.state.handle(SnapshotFailed("n0", "a"), scene.now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 1.0
    assert 8.0 <= pauses[-1] <= 9.0


# --- blame -------------------------------------------------------------------------------------------------------------


def test_a_worker_that_failed_is_left_alone_for_a_while() -> None:
    scene = small_cluster()
    scene.failed("p0", "r")
    assert scene.standing("p0") == "blamed"
    assert {scene.plan(f"r{i}").prefill_worker for i in range(3)} == {"p1"}
    scene.failed("p1", "r")
    rejection = scene.reject("s")
    assert (rejection.reason, rejection.retry_after_s) == ("no_worker", QUARANTINE_FIRST_S)
    scene.now += QUARANTINE_FIRST_S
    assert scene.standing("p0") == "live"
    scene.failed("stranger", "r")


def test_a_request_that_fails_everywhere_does_not_take_all_workers_out() -> None:
    scene = small_cluster(prefill=4, decode=4)
    for i in range(4):
        scene.failed(f"p{i}", "poison")
    assert [scene.standing(f"p{i}") for i in range(4)].count("blamed") == BLAMES_MAX


def test_failures_are_remembered_of_so_many_requests_only() -> None:
    ledger = BlameLedger()
    assert [ledger.counts("poison") for _ in range(4)] == [True, True, False, False]
    for i in range(REQUESTS_MAX):
        ledger.counts(f"r{i}")
    assert ledger.counts("poison")


def test_questions_to_nodes_that_are_gone_are_forgotten() -> None:
    schedule = SnapshotSchedule()
    assert schedule.may_ask("n0", "a", 0.0)
    assert not schedule.may_ask("n0", "a", FETCH_LOST_S - 1.0)
    assert schedule.may_ask("n0", "b", 1.0), "another process is another question"
    assert schedule.may_ask("n0", "b", FETCH_LOST_S + 1.0), "no answer at all"
    schedule.keep(())
    assert schedule.may_ask("n0", "b", FETCH_LOST_S + 1.0)


def test_quarantine_grows_to_a_limit() -> None:
    quarantine, now, spans = Quarantine(), 0.0, []
    for _ in range(10):
        quarantine.blame(now)
        quarantine.blame(now)  # failures that come together are one
        spans.append(quarantine.until - now)
        now = quarantine.until
    assert spans == [min(QUARANTINE_MAX_S, QUARANTINE_FIRST_S * 2**i) for i in range(10)]


def test_a_worker_that_finishes_a_request_has_a_clean_record() -> None:
    scene = small_cluster()
    for _ in range(3):
        scene.failed("p0", f"r{scene.now}")
        scene.beat(20)
    assert scene.state.fleet.prefill["p0"].quarantine.failures == 3
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, (("x", 0, 10, 0, 0.1),))
    scene.beat()
    assert scene.state.fleet.prefill["p0"].quarantine.failures == 0


# --- everything at once ------------------------------------------------------------------------------------------------


def random_report_loads(scene: Scene, draw: random.Random) -> None:
    for worker in scene.workers.values():
        open_there = list(_open(scene, worker.id))
        done = [request for request in open_there if draw.random() < 0.3]
        left = len(open_there) - len(done)
        if isinstance(worker.load, PrefillLoad):
            finished = tuple((*request, 500, 100, 0.5) for request in done)
            worker.load = PrefillLoad(left, 0, left * 500, finished)
        else:
            worker.load = DecodeLoad(0, left, max(0, 100 - 5 * left), 100, 0.02, tuple(done))


def _open(scene: Scene, worker_id: str) -> list[tuple[str, int]]:
    prefill, decode = scene.state.fleet.prefill.get(worker_id), scene.state.fleet.decode.get(worker_id)
    return list(prefill.queue.open) if prefill else list(decode.room.open) if decode else []


def random_step(scene: Scene, draw: random.Random, step: int) -> None:
    worker_id = draw.choice(list(scene.workers))
    match draw.randrange(10):
        case 0:
            scene.silent ^= {worker_id}
        case 1:
            old = scene.workers[worker_id]
            scene.workers[worker_id] = replace(old, incarnation=str(step), fence=0)
        case 2:
            scene.node(draw.choice(list(scene.nodes)), incarnation=str(step))
        case 3:
            scene.failed(worker_id, f"r{draw.randrange(10)}")
        case 4:
            scene.ended(f"r{draw.randrange(10)}", draw.randrange(3))
        case 5 | 6:
            random_report_loads(scene, draw)
            scene.beat(draw.randrange(1, 4))
        case _:
            request = RouteRequest(f"r{draw.randrange(10)}", draw.randrange(3), keys_of("doc", draw.randrange(5)), 400, 100)
            answer = scene.state.route(request, scene.now)
            if isinstance(answer, Plan):
                assert scene.standing(answer.prefill_worker) == scene.standing(answer.decode_worker) == "live"
                assert answer.terms.ttft_s <= scene.state.settings.ttft_max_s
                assert answer.prefill_source is None or answer.prefill_source.node_id in scene.nodes


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 80))
def test_loads_return_to_zero_whatever_happened(draw: random.Random, steps: int) -> None:
    """Workers and nodes fall silent, restart and come back, ends are lost. Work goes to live workers only, every book agrees with
    the assignments at all times, and at last nothing is left."""
    scene = small_cluster(SchedulerSettings(request_life_s=30.0, ttft_max_s=20.0), prefill=2, decode=2, nodes=2)
    for step in range(steps):
        random_step(scene, draw, step)
        for workers in (scene.state.fleet.prefill, scene.state.fleet.decode):
            live = [worker.id for worker in scene.state.fleet.live(workers, scene.state.fleet.live_nodes(scene.now), scene.now)]
            assert live == [worker_id for worker_id in workers if scene.standing(worker_id) == "live"]
        open_requests = {request for worker in scene.workers for request in _open(scene, worker)}
        assert len(open_requests) == len(scene.state.assignments)
    scene.silent.clear()
    for worker in scene.workers.values():
        worker.load = PrefillLoad(1, 0, 10) if isinstance(worker.load, PrefillLoad) else DecodeLoad(1, 0, 100, 100, 0.0)
    scene.beat(70)
    assert len(scene.state.assignments) == 0
    assert all(worker.in_flight == 0 for worker in scene.state.fleet.workers())
    assert all(w.room.blocks >= 0 and w.room._charged == 0 for w in scene.state.fleet.decode.values())
    assert scene.plan("last").prefill_worker in scene.workers


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_equal_events_give_equal_plans(seed: int, steps: int) -> None:
    def run() -> dict[str, object]:
        scene, draw = small_cluster(nodes=2), random.Random(seed)
        for step in range(steps):
            random_step(scene, draw, step)
        return scene.state.view(scene.now)

    assert run() == run()


@pytest.mark.parametrize("size", [1, 16, 64, 256])
def test_the_block_size_is_read_off_the_request(size: int) -> None:
    scene = small_cluster()
    for tokens in {size, size + size // 2, 3 * size - 1, 3 * size, 1000 * size + 1}:
        need, _ = scene.state._need(RouteRequest("r", 0, keys_of("doc", tokens // size), tokens, 10))
        assert need.block_tokens == size
        assert need.tokens - need.reusable_blocks * size >= 1


def test_requests_that_contradict_themselves_do_not_break_it() -> None:
    scene = small_cluster()
    for tokens, keys, new in [(0, 0, 0), (0, 5, 10), (3, 5, -1), (10**9, 1, 10)]:
        scene.state.route(RouteRequest(f"r{tokens}", 0, keys_of("doc", keys), tokens, new), scene.now)
    assert BLOCK_TOKENS == 64
    scene.plan("r")
