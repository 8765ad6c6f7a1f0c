"""The scheduler over real sockets, with fake workers and nodes: heartbeats, silence, restart, garbage, a node that
never answers."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq
from scheduler_scene import BLOCK_BYTES, BLOCK_TOKENS, FakeNode, FakeSnapshot, keys_of

from decode_worker.task import DecodeLoad
from kv_pool.events.codec import encode_batch
from kv_pool.heartbeat import HeartbeatSender
from prefill_worker.task import PrefillLoad
from scheduler.actor import SchedulerActor
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.service import SchedulerService

PERIOD_S = 0.04
SETTINGS = SchedulerSettings(heartbeat_s=PERIOD_S, suspect_after_s=0.3, dead_after_s=0.6)
DOC = keys_of("doc", 8)
DEADLINE_S = 8.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``, polled."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        threading.Event().wait(0.005)
    raise AssertionError(f"not in {DEADLINE_S} s: {what}")


class FakeMember:
    """Sends heartbeats through the real sender until it is silenced."""

    def __init__(
        self, service: SchedulerService, role: str, name: str, load: Callable[[], dict[str, Any]], incarnation: str
    ) -> None:
        self.fence = 0
        self.replies: list[dict[str, Any]] = []
        fixed = {"v": 1, "role": role, "id": name, "incarnation": incarnation, "actor": name, "node_id": "node-0"}
        self._sender = HeartbeatSender(
            resolve=lambda: service.reports_endpoint,
            payload=lambda: fixed | {"fence": self.fence, "load": load()},
            on_reply=self._heard,
            period_s=PERIOD_S,
        )
        self._sender.start()

    def _heard(self, reply: dict[str, Any]) -> None:
        self.replies.append(reply)
        self.fence = max(self.fence, reply["fence"])

    def silence(self) -> None:
        self._sender.stop()


class Cluster:
    """A service, a PUB socket for the events of node-0, and the notices as a gateway sees them."""

    def __init__(self, fetch: Callable[[str, float], FakeSnapshot] | None = None) -> None:
        self.node = FakeNode("node-0", "a")
        self.fetched: list[str] = []
        self.service = SchedulerService(SETTINGS, fetch=fetch or self.fetch)
        self.service.start()
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.PUB)
        self.events.setsockopt(zmq.LINGER, 0)
        port = self.events.bind_to_random_port("tcp://127.0.0.1", 20000, 29999)
        self.events_endpoint = f"tcp://127.0.0.1:{port}"
        self.notices = self.context.socket(zmq.SUB)
        self.notices.setsockopt(zmq.LINGER, 0)
        self.notices.setsockopt(zmq.SUBSCRIBE, b"")
        self.notices.connect(self.service.notices_endpoint)
        self.members: list[FakeMember] = []

    def fetch(self, endpoint: str, timeout_s: float) -> FakeSnapshot:
        self.fetched.append(endpoint)
        return self.node.snapshot()

    def member(self, role: str, name: str, load: Callable[[], dict[str, Any]], incarnation: str = "a") -> FakeMember:
        member = FakeMember(self.service, role, name, load, incarnation)
        self.members.append(member)
        return member

    def add_node(self) -> FakeMember:
        return self.member("node", "node-0", self.node_load, self.node.incarnation)

    def node_load(self) -> dict[str, Any]:
        return {
            "endpoint": f"tcp://node/{self.node.incarnation}", "events": self.events_endpoint, "slots_total": 100,
            "local": f"tcp://node/{self.node.incarnation}",
            "slots_free": 9, "slot_bytes": BLOCK_BYTES, "sequence": self.node.sequence,
        }  # fmt: skip

    def add_prefill(self, name: str = "prefill-0", incarnation: str = "a") -> FakeMember:
        return self.member("prefill", name, lambda: PrefillLoad(0, 0, 0).to_wire(), incarnation)

    def add_decode(self, name: str = "decode-0") -> FakeMember:
        return self.member("decode", name, lambda: DecodeLoad(0, 0, 100, 100, 0.0).to_wire())

    def route(self, request_id: str, **how: Any) -> Plan | Rejection:
        return self.service.route(RouteRequest(request_id, 0, DOC, len(DOC) * BLOCK_TOKENS + 5, 32, **how))

    def planned(self, request_id: str) -> Plan | None:
        answer = self.route(request_id)
        return answer if isinstance(answer, Plan) else None

    def standing(self, worker_id: str) -> str:
        return next((w["standing"] for w in self.service.view()["workers"] if w["id"] == worker_id), "")

    def notice(self, kind: str, worker_id: str) -> None:
        """Wait for this notice, skipping others."""
        until(lambda: self.notices.poll(100) and msgpack.unpackb(self.notices.recv())[:2] == [kind, worker_id], kind)

    def close(self) -> None:
        for member in self.members:
            member.silence()
        self.service.stop()
        self.events.close()
        self.notices.close()
        self.context.term()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def live(cluster: Cluster) -> Cluster:
    cluster.add_node()
    cluster.add_prefill()
    cluster.add_decode()
    until(lambda: cluster.planned("first"), "a plan")
    cluster.service.finished("first", 0)
    return cluster


def test_heartbeats_make_a_cluster_and_replies_name_the_node(live: Cluster) -> None:
    plan = live.planned("r")
    assert plan is not None
    assert (plan.prefill_worker, plan.decode_worker) == ("prefill-0", "decode-0")
    assert live.members[1].replies[-1] == {"fence": 0, "node_endpoint": "tcp://node/a", "node_incarnation": "a"}
    assert live.service.view()["in_flight"] == 1
    live.service.finished("r", 0)
    assert live.service.view()["in_flight"] == 0


def test_events_reach_the_index(live: Cluster) -> None:
    until(lambda: live.fetched == ["tcp://node/a"], "the first snapshot")
    live.events.send_multipart(encode_batch(live.node.stored(DOC)))
    until(lambda: live.service.view()["index"]["entries"] == len(DOC), "the batch, or a snapshot in its place")
    plan = live.planned("r")
    assert plan is not None
    assert plan.cached_blocks == len(DOC)


def test_lost_events_are_made_up_for_by_a_snapshot(live: Cluster) -> None:
    live.node.stored(DOC)
    until(lambda: live.service.view()["index"]["entries"] == len(DOC), "a snapshot")


def test_silence_then_death_then_return_under_a_new_fence(live: Cluster) -> None:
    live.members[1].silence()
    until(lambda: live.standing("prefill-0") == "suspect", "suspicion")
    assert live.planned("r") is None
    live.notice("down", "prefill-0")
    assert live.standing("prefill-0") == "dead"
    returned = live.add_prefill()
    live.notice("up", "prefill-0")
    assert returned.fence == 1
    until(lambda: live.planned("s"), "work for the one that came back")


def test_a_restart_is_noticed_at_once(live: Cluster) -> None:
    live.members[1].silence()
    live.add_prefill(incarnation="b")
    live.notice("down", "prefill-0")
    live.notice("up", "prefill-0")
    until(lambda: live.planned("r"), "a plan")


def test_a_worker_that_is_reported_is_left_alone_for_a_while(live: Cluster) -> None:
    live.service.report_failure("prefill-0", "r")
    assert live.standing("prefill-0") == "blamed"
    answer = live.route("r")
    assert isinstance(answer, Rejection)
    assert answer.reason == "no_worker"


def test_garbage_does_not_kill_it(live: Cluster) -> None:
    with live.context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(live.service.reports_endpoint)
        for frames in ([b""], [b"\xc1"], [msgpack.packb({"v": 1})], [b"a", b"b", b"c"], [b"x" * 1_000_000]):
            stranger.send_multipart(frames)
    for frames in ([b"kv@"], [b"kv@node-0@a", b"", b""], [b"kv@x", b"1" * 8, b"\xc1"], [b"kv@node-0@a"] * 9):
        live.events.send_multipart(frames)
    until(lambda: live.service.view()["malformed"]["reports"] >= 3, "garbage among the reports")
    live.events.send_multipart(encode_batch(live.node.stored(DOC)))
    until(lambda: live.service.view()["index"]["entries"] == len(DOC), "the events after the garbage")
    until(lambda: live.service.view()["malformed"]["events"] >= 1, "garbage among the events")
    assert live.planned("r") is not None


def test_a_node_that_gives_no_snapshot_holds_nobody_up() -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(endpoint: str, timeout_s: float) -> FakeSnapshot:
        entered.set()
        release.wait(30)
        raise TimeoutError("no snapshot")

    cluster = Cluster(hang)
    cluster.add_node()
    cluster.add_prefill()
    cluster.add_decode()
    try:
        assert entered.wait(DEADLINE_S)
        until(lambda: cluster.planned("r"), "a plan")
        cluster.members[1].silence()
        cluster.notice("down", "prefill-0")
    finally:
        started = time.monotonic()
        cluster.close()
        release.set()
    assert time.monotonic() - started < 3.0


def test_it_uses_next_to_nothing_when_idle(live: Cluster) -> None:
    """Three members beat 25 times a second, a dozen times more often than by default."""
    started = time.thread_time(), time.process_time(), time.monotonic()
    until(lambda: time.monotonic() - started[2] > 1.0, "a second")
    used = time.process_time() - started[1] - (time.thread_time() - started[0])
    assert used < 0.3


def test_it_can_be_stopped_without_having_been_started() -> None:
    SchedulerService(SETTINGS, fetch=lambda *_: FakeNode("n", "a").snapshot()).stop()


def test_the_actor_is_the_service_under_its_methods_and_none_is_a_coroutine() -> None:
    methods = dict(inspect.getmembers(SchedulerActor, inspect.isfunction))
    assert not [name for name, method in methods.items() if inspect.iscoroutinefunction(method)]
    actor = SchedulerActor(SETTINGS.model_dump(mode="json"))
    try:
        assert set(actor.endpoints()) == {"reports", "notices"}
        assert all(endpoint.startswith("tcp://127.0.0.1:2") for endpoint in actor.endpoints().values())
        answer = actor.route(RouteRequest("r", 0, DOC, 600, 10))
        assert isinstance(answer, Rejection)
        actor.finished("r", 0)
        actor.report_failure("prefill-0", "r")
        assert actor.view()["workers"] == []
    finally:
        actor._service.stop()
