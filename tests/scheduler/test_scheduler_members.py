"""Members: joining, silence, death, return, restart, blame; and what that costs the requests."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from scheduler_scene import BEAT_S, DOC, Scene, keys_of, lengths, loads, notices, small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.blame import BLAMES_MAX, REQUESTS_MAX, BlameLedger
from scheduler.members import QUARANTINE_FIRST_S, QUARANTINE_MAX_S, RAMP_S, Quarantine
from scheduler.messages import Follow, Reply, SnapshotFailed, Tick, Unfollow
from scheduler.plan import SchedulerSettings
from scheduler.snapshots import FETCH_LOST_S, SnapshotSchedule
from scheduler.state import STALL_S


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
    scene = small_cluster(SchedulerSettings(classes=("default=ttft 1000h",)))
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
    assert lengths(scene.state.index, DOC) == {}
    assert scene.standing("p0") == "joining"
    scene.beat()
    assert scene.standing("p0") == "live"
    chosen = [scene.plan(f"r{i}", keys_of(f"doc{i}", 8)).prefill_worker for i in range(6)]
    assert chosen.count("p0") == 1, "nothing is cached there: it is ramped up"


def test_events_lost_behind_the_last_heartbeat_are_found_without_another_event() -> None:
    scene = small_cluster(nodes=1)
    scene.nodes["n0"].stored(DOC)  # published, never arrived
    scene.beat(3)
    assert lengths(scene.state.index, DOC) == {"n0": len(DOC)}


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


def test_a_node_that_is_drained_is_planned_without_until_it_is_taken_back() -> None:
    scene = small_cluster(nodes=2)  # p0, d0 at n0 and p1, d1 at n1
    scene.store("n0", DOC)
    assert scene.plan("before", DOC).prefill_worker == "p0"
    scene.nodes["n0"].draining = True
    scene.beat()
    plan = scene.plan("while", DOC)
    assert (plan.prefill_worker, plan.decode_worker, plan.prefill_source, plan.cached_blocks) == ("p1", "d1", None, 0)
    scene.nodes["n1"].draining = True
    scene.beat()
    assert scene.reject("both", DOC).reason == "no_worker"
    scene.nodes["n0"].draining = False
    scene.beat()
    assert scene.plan("after", DOC).prefill_worker == "p0"
    assert scene.plan("after", DOC).cached_blocks > 0, "what it has is still known"
