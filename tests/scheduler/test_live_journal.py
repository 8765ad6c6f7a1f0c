"""A live scheduler, with real pool nodes, sockets and threads, is written down and done again: the same plans and actions, byte
for byte."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler_scene import keys_of
from test_with_pool_node import PERIOD_S, SLOT_BYTES, beats, store, until

from cluster.simulator.replay import replay_journal
from decode_worker.task import DecodeLoad
from kv_pool.events.snapshot import fetch_snapshot
from kv_pool.heartbeat import HeartbeatSender
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings
from prefill_worker.task import PrefillLoad
from scheduler.journal import read_journal
from scheduler.messages import BlocksChanged, NodeReport, RequestEnded, SnapshotArrived, SpeedsRecalled, Tick, WorkerReport
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.service import SchedulerService
from scheduler.speeds import Speeds
from scheduler.speeds_file import SpeedsFile

CALLERS = 3
REQUESTS = 40
MODEL = "tiny"


class Worker:
    """Does what it is given in no time, and reports speeds that drift, in heartbeats as real ones."""

    def __init__(self, service: SchedulerService, role: str, number: int) -> None:
        self.id = f"{role}-{number}"
        self._role = role
        self._node = f"node-{number}"
        self._draw = random.Random(number)
        self._lock = threading.Lock()
        self._done: list[tuple[str, int, int]] = []
        self._sender = beats(service, self._payload)
        self._fence = 0

    def give(self, plan: Plan, tokens: int) -> None:
        with self._lock:
            self._done.append((plan.request_id, plan.attempt, tokens))

    def stop(self) -> None:
        self._sender.stop()

    def _payload(self) -> dict[str, Any]:
        with self._lock:
            done, self._done = self._done[:64], self._done[64:]
        load: PrefillLoad | DecodeLoad
        if self._role == "prefill":
            finished = tuple((request, attempt, n, 0, n * self._draw.uniform(1e-3, 2e-3)) for request, attempt, n in done)
            load = PrefillLoad(len(done) % 3, 0, 17 * len(done), finished, ((2**20, 0, 2**18, 0, 1e-3),), 0.01)
        else:
            steps = ((1 + len(done), 500, self._draw.uniform(0.02, 0.03)),)
            load = DecodeLoad(0, 0, 400, 400, 0.0, tuple(each[:2] for each in done), 1024, 100, steps)
        return {
            "v": 1, "role": self._role, "id": self.id, "incarnation": "a", "actor": self.id, "node_id": self._node, "fence": 0,
            "load": load.to_wire(),
        }  # fmt: skip


def node_beats(service: SchedulerService, node: PoolNode) -> HeartbeatSender:
    load = {
        "endpoint": node.endpoint, "events": node.events_endpoint, "local": node.local_endpoint, "slots_total": 32,
        "slots_free": 16, "slot_bytes": SLOT_BYTES,
    }  # fmt: skip
    fixed = {"v": 1, "role": "node", "id": node.node_id, "incarnation": node.incarnation, "actor": node.node_id}
    return beats(service, lambda: fixed | {"node_id": node.node_id, "fence": 0, "load": load})


def ask(service: SchedulerService, workers: dict[str, Worker], caller: int) -> None:
    """What a gateway does, some of it: plans, ends with and without the truth, failures, second attempts."""
    draw = random.Random(caller)
    for i in range(REQUESTS):
        request_id = f"{caller}/{i}"
        tokens = 64 * 8 + 10
        keys = keys_of(f"doc{draw.randrange(4)}", 8)
        answer = service.route(RouteRequest(request_id, 0, keys, tokens, draw.choice((1, 40))))
        if not isinstance(answer, Plan):
            continue
        workers[answer.prefill_worker].give(answer, tokens)
        workers[answer.decode_worker].give(answer, tokens)
        match draw.randrange(2, 8) if i != REQUESTS // 2 else caller:
            case 0:  # one caller, once: a worker that is blamed gets nothing for a second
                service.report_failure(answer.prefill_worker, request_id)
                service.route(RouteRequest(request_id, 1, keys, tokens, 40, avoid=(answer.prefill_worker,), admitted=True))
                service.finished(request_id, 1, None, None)
            case 1 | 2:
                service.finished(request_id, 0)
            case 3:
                pass  # only the workers' reports will tell
            case _:
                service.finished(request_id, 0, draw.uniform(0.01, 0.5), draw.randrange(1, 40))


def test_a_live_run_replays_to_the_same_plans_byte_for_byte(tmp_path: Path):
    journal = tmp_path / "journal"
    speeds = SpeedsFile(tmp_path / "speeds", MODEL)
    speeds.save(Speeds({"prefill-0": (1.5e-3, 1e-7)}, {}, {"decode-0": (0.02, 0.0, 0.0)}))
    settings = SchedulerSettings(heartbeat_s=PERIOD_S, suspect_after_s=0.4, dead_after_s=0.8, journal=str(journal))
    service = SchedulerService(settings, fetch=fetch_snapshot, speeds=speeds)
    service.start()
    pool = PoolSettings(dram=str(32 * SLOT_BYTES))
    nodes = [PoolNode(node_id=f"node-{i}", slot_bytes=SLOT_BYTES, settings=pool) for i in range(2)]
    stops: list[Callable[[], None]] = []
    try:
        for node in nodes:
            node.start()
            stops.append(node_beats(service, node).stop)
        workers = {w.id: w for role in ("prefill", "decode") for w in (Worker(service, role, 0), Worker(service, role, 1))}
        stops += [worker.stop for worker in workers.values()]
        until(lambda: sum(w["standing"] == "live" for w in service.view()["workers"]) == 4, "all are live")
        store(nodes[0], keys_of("doc0", 8))
        store(nodes[1], keys_of("doc1", 4))
        until(lambda: service.view()["index"]["entries"] == 12, "the index knows the blocks")
        callers = [threading.Thread(target=ask, args=(service, workers, i)) for i in range(CALLERS)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        workers["prefill-1"].stop()
        until(lambda: any(w["standing"] == "dead" for w in service.view()["workers"]), "one is given up")
        ask(service, workers, CALLERS)
        nodes[1].stop()
        assert service.view()["journal"]["ended"] == ""
    finally:
        for stop in stops:
            stop()
        service.stop()
        for node in nodes:
            node.stop()

    report = replay_journal(journal)
    assert report.equal, report
    assert report.plans > CALLERS * REQUESTS
    with journal.open("rb") as stream:
        kinds = {type(row.input) for row in read_journal(stream)[2]}
    assert kinds >= {
        WorkerReport, NodeReport, BlocksChanged, SnapshotArrived, RequestEnded, RouteRequest, Tick, SpeedsRecalled
    }  # fmt: skip
    learnt = speeds.load()
    assert learnt is not None
    assert set(learnt.prefill) == {"prefill-0", "prefill-1"}
    assert learnt.prefill["prefill-0"] != (1.5e-3, 1e-7)
    assert {"decode-0"} <= set(learnt.steps) <= {"decode-0", "decode-1"}
