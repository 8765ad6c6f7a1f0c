"""The scheduler's books as anybody could keep them: all that was said is in a list, and whoever asks counts it anew from the
start.

No columns, no queues, no estimates: who is there, what is open where, and what each node is believed to have. What a node is
believed to have needs no order of events at all: it is what the node had after batch ``s``, the last one for which a snapshot
covers the beginning and every batch behind that snapshot has come.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kv_pool.events.types import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from prefill_worker.task import PrefillLoad
from scheduler.assignments import LOST_AFTER_S
from scheduler.blame import BLAMES_MAX
from scheduler.members import QUARANTINE_FIRST_S, QUARANTINE_MAX_S, RETIRED_MAX
from scheduler.messages import (
    BlocksChanged,
    Event,
    NodeReport,
    RequestEnded,
    SnapshotArrived,
    Tick,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.state import STALL_S

Attempt = tuple[str, int]
Copies = set[tuple[str, BlockKey]]
"""(medium, key)."""


@dataclass(frozen=True)
class Routed:
    request: RouteRequest
    answer: Plan | Rejection


@dataclass
class Process:
    """What is known of one that sends heartbeats. ``retired`` are those that it or its predecessors replaced."""

    incarnation: str
    retired: list[str]
    heard_at: float = 0.0
    dead: bool = False

    def silent_s(self, now: float) -> float:
        return now - self.heard_at


@dataclass
class NodeProcess(Process):
    draining: bool = False
    batches: set[int] = field(default_factory=set)
    """That have come since the node was there."""
    snapshots: set[int] = field(default_factory=set)

    def known_until(self) -> int | None:
        """The batch after which its blocks are known; None where nothing is."""
        best: int | None = None
        for start in self.snapshots:
            last = start
            while last + 1 in self.batches:
                last += 1
            best = last if best is None else max(best, last)
        return best


@dataclass
class WorkerProcess(Process):
    """``told`` is the node incarnation in our last reply, ``attached`` that of the reply before the last word."""

    prefills: bool = True
    node_id: str = ""
    fence: int = 0
    told: str | None = None
    attached: str | None = None
    blamed_until: float = float("-inf")
    failures: int = 0


@dataclass
class Open:
    """One request under way: who still has to do something for it."""

    attempt: int
    prefill: str | None
    decode: str | None
    since: float


class Books:
    def __init__(self, settings: SchedulerSettings) -> None:
        self.workers: dict[str, WorkerProcess] = {}
        self.nodes: dict[str, NodeProcess] = {}
        self.open: dict[str, Open] = {}
        self.planned_keys: dict[tuple[str, str], set[BlockKey]] = {}
        """What workers of a (node, incarnation) were ever told to compute."""
        self._settings = settings
        self._blames: Counter[str] = Counter()
        self._ticked_at: float | None = None

    # --- questions ------------------------------------------------------------------------------------------------------

    def attempts(self) -> set[Attempt]:
        return {(request_id, request.attempt) for request_id, request in self.open.items()}

    def open_at(self, worker_id: str) -> int:
        return sum(worker_id in (request.prefill, request.decode) for request in self.open.values())

    def standing(self, worker_id: str, now: float) -> str:
        worker, limit = self.workers[worker_id], self._settings.suspect_after_s
        node = self.nodes.get(worker.node_id)
        if worker.dead:
            return "dead" if worker.silent_s(now) > limit else "fenced"
        if worker.silent_s(now) > limit:
            return "suspect"
        if node is None or node.dead or worker.attached != node.incarnation:
            return "joining"
        if node.silent_s(now) > limit:
            return "suspect"
        return "blamed" if now < worker.blamed_until else "live"

    def may_work(self, *, prefills: bool, avoid: tuple[str, ...], now: float) -> set[str]:
        return {
            worker_id
            for worker_id, worker in self.workers.items()
            if worker.prefills is prefills
            and worker_id not in avoid
            and self.standing(worker_id, now) == "live"
            and not self.nodes[worker.node_id].draining
        }

    def usable_node(self, node_id: str, now: float) -> bool:
        node = self.nodes[node_id]
        return not (node.dead or node.draining or node.silent_s(now) > self._settings.suspect_after_s)

    # --- what was said --------------------------------------------------------------------------------------------------

    def take(self, said: Event | Routed, now: float) -> None:
        match said:
            case WorkerReport():
                self._worker(said, now)
            case NodeReport():
                self._node(said, now)
            case BlocksChanged(batch):
                node = self._living(batch.node_id, batch.incarnation)
                if node is not None:
                    node.batches.add(batch.sequence)
            case SnapshotArrived(snapshot):
                node = self._living(snapshot.node_id, snapshot.incarnation)
                if node is not None:
                    node.snapshots.add(snapshot.sequence)
            case RequestEnded(request_id, attempt):
                self._over(request_id, attempt)
            case WorkerFailed(worker_id, request_id):
                self._failed(worker_id, request_id, now)
            case Tick():
                self._tick(now)
            case Routed(request, answer):
                self._routed(request, answer, now)
            case _:
                pass

    def _worker(self, report: WorkerReport, now: float) -> None:
        prefills = isinstance(report.load, PrefillLoad)
        worker = self.workers.get(report.worker_id)
        if worker is not None and report.incarnation in worker.retired:
            return
        if worker is not None and worker.incarnation == report.incarnation and worker.prefills is not prefills:
            return
        if worker is None or worker.incarnation != report.incarnation:
            if worker is not None:
                self._all_over(report.worker_id)
            worker = WorkerProcess(report.incarnation, _retired(worker), prefills=prefills)
            self.workers[report.worker_id] = worker
        worker.heard_at, worker.node_id = now, report.node_id
        worker.fence = max(worker.fence, report.fence)
        worker.dead = worker.dead and report.fence < worker.fence
        node = self.nodes.get(report.node_id)
        worker.attached, worker.told = worker.told, None if node is None or node.dead else node.incarnation
        if worker.dead:
            return
        for request_id, attempt, *_ in report.load.finished:
            if prefills:
                self._computed(request_id, attempt)
            else:
                self._over(request_id, attempt)
        if report.load.finished:
            worker.failures = 0
        if report.load.waiting + report.load.running == 0:
            self._not_there(report.worker_id, now)

    def _node(self, report: NodeReport, now: float) -> None:
        node = self.nodes.get(report.node_id)
        if node is not None and report.incarnation in node.retired:
            return
        if node is None or node.incarnation != report.incarnation:
            node = self.nodes[report.node_id] = NodeProcess(report.incarnation, _retired(node))
        node.heard_at, node.dead, node.draining = now, False, report.load.draining

    def _tick(self, now: float) -> None:
        pause = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        everybody = [*self.nodes.values(), *self.workers.values()]
        buried = {worker_id for worker_id, worker in self.workers.items() if worker.dead}
        if pause > STALL_S:  # nobody could be heard in it
            for process in everybody:
                if not process.dead:
                    process.heard_at = min(now, process.heard_at + pause)
        for request_id, request in list(self.open.items()):
            if request.since + self._settings.request_life_s <= now:
                del self.open[request_id]
        for process in everybody:
            if not process.dead and process.silent_s(now) > self._settings.dead_after_s:
                process.dead, process.retired = True, []
        for node in self.nodes.values():
            if node.dead:
                node.batches, node.snapshots = set(), set()
        for worker_id, worker in self.workers.items():
            if worker.dead and worker_id not in buried:
                worker.fence += 1
                self._all_over(worker_id)

    def _failed(self, worker_id: str, request_id: str, now: float) -> None:
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        self._blames[request_id] += 1
        if self._blames[request_id] <= BLAMES_MAX and now >= worker.blamed_until:
            worker.blamed_until = now + min(QUARANTINE_MAX_S, QUARANTINE_FIRST_S * 2**worker.failures)
            worker.failures += 1

    def _routed(self, request: RouteRequest, answer: Plan | Rejection, now: float) -> None:
        before = self.open.get(request.request_id)
        if before is not None and before.attempt > request.attempt:
            return
        self.open.pop(request.request_id, None)
        if isinstance(answer, Plan):
            decode = answer.decode_worker if request.max_new_tokens > 1 else None
            self.open[request.request_id] = Open(request.attempt, answer.prefill_worker, decode, now)
            node_id = self.workers[answer.prefill_worker].node_id
            told = self.planned_keys.setdefault((node_id, self.nodes[node_id].incarnation), set())
            told |= set(request.keys)

    # --- ends -----------------------------------------------------------------------------------------------------------

    def _over(self, request_id: str, attempt: int) -> None:
        if request_id in self.open and self.open[request_id].attempt == attempt:
            del self.open[request_id]

    def _computed(self, request_id: str, attempt: int) -> None:
        request = self.open.get(request_id)
        if request is not None and request.attempt == attempt:
            request.prefill = None
            if request.decode is None:
                del self.open[request_id]

    def _all_over(self, worker_id: str) -> None:
        """The worker is given up."""
        self.open = {i: r for i, r in self.open.items() if worker_id not in (r.prefill, r.decode)}

    def _not_there(self, worker_id: str, now: float) -> None:
        """The worker has nothing to do: what it should have had for a while, it does not have."""
        for request_id, request in list(self.open.items()):
            if request.since > now - LOST_AFTER_S:
                continue
            if request.decode == worker_id:
                del self.open[request_id]
            elif request.prefill == worker_id:
                self._computed(request_id, request.attempt)

    def _living(self, node_id: str, incarnation: str) -> NodeProcess | None:
        node = self.nodes.get(node_id)
        return node if node is not None and not node.dead and node.incarnation == incarnation else None


def _retired(before: Process | None) -> list[str]:
    return [] if before is None else [*before.retired, before.incarnation][-RETIRED_MAX:]


def recount(log: list[tuple[float, Event | Routed]], settings: SchedulerSettings) -> Books:
    books = Books(settings)
    for now, said in log:
        books.take(said, now)
    return books


def content_after(batches: list[EventBatch], sequence: int | None) -> Copies:
    """What a node has after the first batches up to ``sequence``."""
    copies: Copies = set()
    for batch in batches[: 0 if sequence is None else sequence + 1]:
        for event in batch.events:
            match event:
                case BlockStored():
                    copies |= {(event.medium, key) for key in event.keys}
                case BlockRemoved():
                    copies -= {(event.medium, key) for key in event.keys}
                case AllBlocksCleared():
                    copies = set()
    return copies
