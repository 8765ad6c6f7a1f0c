"""A scheduler state and the members that talk to it, on a clock that only the test moves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decode_worker.task import DecodeLoad
from kv_pool.events.types import BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from prefill_worker.task import PrefillLoad
from scheduler.index import BlockIndex
from scheduler.messages import (
    Action,
    BlocksChanged,
    FetchSnapshot,
    NodeLoad,
    NodeReport,
    Notice,
    Reply,
    RequestEnded,
    SnapshotArrived,
    Tick,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.state import SchedulerState

BLOCK_TOKENS = 64
BLOCK_BYTES = 1_000_000
BEAT_S = 0.5


def keys_of(name: str, count: int) -> tuple[BlockKey, ...]:
    """The keys of ``count`` blocks of a document; two documents share nothing."""
    return tuple(BlockKey(hashlib.blake2b(f"{name}:{i}".encode(), digest_size=16).digest()) for i in range(count))


def lengths(index: BlockIndex, keys: Sequence[BlockKey]) -> dict[str, int]:
    """Leading ``keys`` by node, without those that have none."""
    blocks, _ = index.prefixes(keys)
    return {index.node_at(slot): count for slot, count in enumerate(blocks.tolist()) if count}


@dataclass(frozen=True)
class FakeSnapshot:
    node_id: str
    incarnation: str
    sequence: int
    keys_by_medium: dict[str, frozenset[BlockKey]]


@dataclass
class FakeNode:
    """A pool node: the truth about its keys, and its numbered batches."""

    id: str
    incarnation: str
    sequence: int = -1
    keys: frozenset[BlockKey] = frozenset()
    draining: bool = False

    def stored(self, keys: Iterable[BlockKey]) -> EventBatch:
        added = tuple(keys)
        self.keys |= set(added)
        return self._batch(BlockStored(added, None, BLOCK_TOKENS, "dram"))

    def removed(self, keys: Iterable[BlockKey]) -> EventBatch:
        gone = tuple(keys)
        self.keys -= set(gone)
        return self._batch(BlockRemoved(gone, "dram"))

    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot(self.id, self.incarnation, self.sequence, {"dram": self.keys})

    def report(self) -> NodeReport:
        here = f"tcp://{self.id}/{self.incarnation}"
        load = NodeLoad(
            here, f"tcp://{self.id}/events", 100, 50, BLOCK_BYTES,
            local=here, draining=self.draining, sequence=self.sequence,
        )  # fmt: skip
        return NodeReport(self.id, self.incarnation, load)

    def _batch(self, event: BlockStored | BlockRemoved) -> EventBatch:
        self.sequence += 1
        return EventBatch(self.sequence, self.id, self.incarnation, 0.0, (event,))


@dataclass
class FakeWorker:
    """A worker that adopts every fence it is told and does nothing else; tests set its ``load``."""

    id: str
    node_id: str
    incarnation: str
    load: PrefillLoad | DecodeLoad
    fence: int = 0
    obedient: bool = True

    def report(self) -> WorkerReport:
        return WorkerReport(self.id, self.incarnation, self.id, self.node_id, self.fence, self.load)

    def hear(self, actions: list[Action]) -> Reply:
        reply = actions[0]
        assert isinstance(reply, Reply)
        if self.obedient:
            self.fence = max(self.fence, reply.fence)
        return reply


class Scene:
    """``beat`` lets all members but the silent ones send a heartbeat, half a second later."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.state = SchedulerState(settings or SchedulerSettings())
        self.now = 1000.0
        self.nodes: dict[str, FakeNode] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.silent: set[str] = set()
        self.actions: list[Action] = []

    def node(self, node_id: str, incarnation: str = "a") -> FakeNode:
        self.nodes[node_id] = FakeNode(node_id, incarnation)
        return self.nodes[node_id]

    def prefill(self, worker_id: str, node_id: str = "n0", incarnation: str = "a") -> FakeWorker:
        return self._worker(FakeWorker(worker_id, node_id, incarnation, PrefillLoad(0, 0, 0)))

    def decode(self, worker_id: str, node_id: str = "n0", incarnation: str = "a", blocks: int = 1000) -> FakeWorker:
        return self._worker(FakeWorker(worker_id, node_id, incarnation, DecodeLoad(0, 0, blocks, blocks, 0.0)))

    def _worker(self, worker: FakeWorker) -> FakeWorker:
        self.workers[worker.id] = worker
        return worker

    def beat(self, times: int = 1) -> list[Action]:
        """Returns the actions other than replies; snapshots are answered at once."""
        caused: list[Action] = []
        for _ in range(times):
            self.now += BEAT_S
            for node in self.nodes.values():
                if node.id not in self.silent:
                    caused += self._do(self.state.handle(node.report(), self.now))
            for worker in self.workers.values():
                if worker.id not in self.silent:
                    actions = self.state.handle(worker.report(), self.now)
                    worker.hear(actions)
                    caused += self._do(actions)
            caused += self._do(self.state.handle(Tick(), self.now))
        return caused

    def store(self, node_id: str, keys: Iterable[BlockKey]) -> None:
        self._do(self.state.handle(BlocksChanged(self.nodes[node_id].stored(keys)), self.now))

    def route(
        self, request_id: str, keys: tuple[BlockKey, ...] = (), *, tail: int = 10, attempt: int = 0, max_new_tokens: int = 64,
        avoid: tuple[str, ...] = (),
    ) -> Plan | Rejection:  # fmt: skip
        tokens = len(keys) * BLOCK_TOKENS + tail
        return self.state.route(RouteRequest(request_id, attempt, keys, tokens, max_new_tokens, avoid=avoid), self.now)

    def plan(self, request_id: str, keys: tuple[BlockKey, ...] = (), **how: object) -> Plan:
        answer = self.route(request_id, keys, **how)  # type: ignore[arg-type]
        assert isinstance(answer, Plan), answer
        return answer

    def reject(self, request_id: str, keys: tuple[BlockKey, ...] = (), **how: object) -> Rejection:
        answer = self.route(request_id, keys, **how)  # type: ignore[arg-type]
        assert isinstance(answer, Rejection), answer
        return answer

    def ended(self, request_id: str, attempt: int = 0) -> None:
        assert self.state.handle(RequestEnded(request_id, attempt), self.now) == []

    def failed(self, worker_id: str, request_id: str) -> None:
        assert self.state.handle(WorkerFailed(worker_id, request_id), self.now) == []

    def standing(self, worker_id: str) -> str:
        worker = self.state.fleet.worker(worker_id)
        assert worker is not None
        return self.state.fleet.standing(worker, self.now).value

    def _do(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, FetchSnapshot) and action.node_id not in self.silent:
                self.state.handle(SnapshotArrived(self.nodes[action.node_id].snapshot()), self.now)
        return [action for action in actions if not isinstance(action, Reply | FetchSnapshot)]


def small_cluster(settings: SchedulerSettings | None = None, *, prefill: int = 2, decode: int = 2, nodes: int = 1) -> Scene:
    """Workers p0 .. and d0 .. spread over nodes n0 .., all live."""
    scene = Scene(settings)
    for i in range(nodes):
        scene.node(f"n{i}")
    for i in range(prefill):
        scene.prefill(f"p{i}", f"n{i % nodes}")
    for i in range(decode):
        scene.decode(f"d{i}", f"n{i % nodes}")
    scene.beat(3)
    return scene


DOC = keys_of("doc", 16)


def notices(actions: Sequence[Action]) -> list[tuple[str, str]]:
    return [(a.kind, a.worker_id) for a in actions if isinstance(a, Notice)]


def loads(scene: Scene) -> dict[str, int]:
    return {worker.id: worker.in_flight for worker in scene.state.fleet.workers()}
