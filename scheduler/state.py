"""The scheduler's decisions, behind two doors: ``handle(event, now) -> actions`` and ``route(request, now) -> Plan | Rejection``.

Pure and deterministic: ``now`` is an argument (seconds, monotonic), equal calls give equal answers. Nothing here may raise for
what the world does; what is not known or too late is ignored and counted in ``counters``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from decode_worker.task import DecodeLoad
from engine.serving.addresses import BlockSource
from prefill_worker.task import PrefillLoad
from scheduler.assignments import Assignments
from scheduler.blame import BlameLedger
from scheduler.fleet import AnyWorker, Fleet
from scheduler.index import ENTRIES_MAX, BlockIndex
from scheduler.members import DecodeWorker, PrefillWorker, Standing, Worker
from scheduler.messages import (
    Action,
    BlocksChanged,
    Event,
    FetchSnapshot,
    NodeReport,
    RequestEnded,
    SnapshotArrived,
    SnapshotFailed,
    Tick,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.routing.choose import Choice, DecodeCandidate, Need, Obstacle, PrefillCandidate, View, choose
from scheduler.routing.links import LinkSpeeds
from scheduler.snapshots import SnapshotSchedule

IN_FLIGHT_MAX: Final = 65536
BLOCK_TOKENS_GUESS: Final = 64
"""Until a request shows the block size."""
STALL_S: Final = 1.0
"""A longer pause between two ticks is our own: nobody could be heard in it, so nobody was silent."""
RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 60.0


class SchedulerState:
    """All that one scheduler knows. ``index`` and ``links`` may be read by tests and views, never changed from outside."""

    def __init__(self, settings: SchedulerSettings, *, entries_max: int = ENTRIES_MAX) -> None:
        self.settings = settings
        self.index = BlockIndex(entries_max)
        self.links = LinkSpeeds(settings.link_bytes_per_s)
        self.assignments = Assignments(settings.request_life_s)
        self.counters: Counter[str] = Counter()
        self.fleet = Fleet(settings, self.index, self.links, self.assignments, self.counters)
        self._snapshots = SnapshotSchedule()
        self._blame = BlameLedger()
        self._block_tokens = BLOCK_TOKENS_GUESS
        self._ticked_at: float | None = None

    # --- events ---------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event. A report's ``Reply`` is always the first action; other events cause none."""
        match event:
            case WorkerReport():
                return self._worker_reported(event, now)
            case NodeReport():
                actions = self.fleet.node_heard(event, now)
            case BlocksChanged():
                self.index.apply(event.batch)
                actions = []
            case SnapshotArrived():
                self._snapshots.arrived(event.snapshot.node_id, now)
                self.index.load(event.snapshot)
                actions = []
            case SnapshotFailed():
                self._snapshots.failed(event.node_id, event.incarnation, now)
                return []
            case RequestEnded():
                self.assignments.end((event.request_id, event.attempt), now)
                return []
            case WorkerFailed():
                self._worker_failed(event, now)
                return []
            case Tick():
                actions = self._tick(now)
        return actions + self._fetches(now)

    def _worker_reported(self, report: WorkerReport, now: float) -> list[Action]:
        worker, actions = self.fleet.worker_heard(report, now)
        if worker is None or worker.dead:
            return actions  # its numbers are of work that runs elsewhere
        match worker, report.load:
            case PrefillWorker(), PrefillLoad() as load:
                for request_id, attempt, *_ in load.finished:
                    self.assignments.prefill_ended((request_id, attempt), now)
                worker.queue.report(load, now)
                self._settle(worker, len(load.finished), idle=load.waiting + load.running == 0, now=now)
            case DecodeWorker(), DecodeLoad() as load:
                for request in load.finished:
                    self.assignments.end(request, now)
                worker.room.report(load, now)
                self._settle(worker, len(load.finished), idle=load.waiting + load.running == 0, now=now)
            case _:
                self.counters["reports_contradictory"] += 1
        return actions

    def _settle(self, worker: Worker, finished: int, *, idle: bool, now: float) -> None:
        if finished:
            worker.ramp.finished += finished
            worker.quarantine.failures = 0
        if idle:
            self.counters["requests_lost"] += self.assignments.drop_unknown(worker, now)

    def _worker_failed(self, event: WorkerFailed, now: float) -> None:
        worker = self.fleet.worker(event.worker_id)
        if worker is None:
            self.counters["blames_of_unknown"] += 1
        elif self._blame.counts(event.request_id):
            worker.quarantine.blame(now)
            self.counters["quarantines"] += 1

    def _tick(self, now: float) -> list[Action]:
        if self._ticked_at is not None and now - self._ticked_at > STALL_S:
            self.fleet.forgive(now - self._ticked_at, now)
            self.counters["stalls"] += 1
        self._ticked_at = now
        self._snapshots.keep(self.fleet.nodes)
        self.counters["requests_expired"] += self.assignments.expire(now)
        return self.fleet.bury(now)

    def _fetches(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for node_id in sorted(self.index.wanted):
            node = self.fleet.nodes[node_id]
            if self._snapshots.may_ask(node_id, node.incarnation, now):
                actions.append(FetchSnapshot(node_id, node.incarnation, node.endpoint))
        return actions

    # --- routing --------------------------------------------------------------------------------------------------------

    def route(self, request: RouteRequest, now: float) -> Plan | Rejection:
        """Choose a pair and count the request as theirs at once. An earlier attempt of the same request is over with this."""
        under_way = self.assignments.attempt(request.request_id)
        if under_way is not None:
            if under_way > request.attempt:
                return self._reject(request, "overloaded", RETRY_MIN_S, "a later attempt is under way")
            self.assignments.end_request(request.request_id, now)
        if len(self.assignments) >= IN_FLIGHT_MAX:
            return self._reject(request, "overloaded", RETRY_MIN_S, "too many requests under way")
        need, prompt_blocks = self._need(request)
        found = choose(need, self._view(request, now))
        if isinstance(found, Obstacle):
            return self._refuse(request, found, now)
        if found.terms.ttft_s > self.settings.ttft_max_s:
            late_s = found.terms.ttft_s - self.settings.ttft_max_s
            return self._reject(request, "overloaded", late_s, "the first token would be too late")
        self._assign(request, found, prompt_blocks, need.decode_blocks - prompt_blocks, now)
        return self._plan(request, found)

    def _need(self, request: RouteRequest) -> tuple[Need, int]:
        """What the request takes, and how many blocks of it are the prompt's."""
        if request.keys:
            # A power of two with tokens // block_tokens == len(keys): there is exactly one.
            self._block_tokens = 1 << (max(1, request.tokens // len(request.keys)).bit_length() - 1)
        size = self._block_tokens
        answer = min(request.max_new_tokens, self.settings.expected_output_tokens)
        prompt_blocks = -(-request.tokens // size)
        reusable = min(len(request.keys), max(0, request.tokens - 1) // size)
        # With one token to come, prefill's own is the whole answer and decode gets nothing.
        decode_blocks = -(-(request.tokens + answer) // size) if request.max_new_tokens > 1 else 0
        return Need(request.tokens, size, self.fleet.block_bytes, reusable, decode_blocks), prompt_blocks

    def _view(self, request: RouteRequest, now: float) -> View:
        nodes = self.fleet.live_nodes(now)
        prefill = [
            PrefillCandidate(w.id, w.node_id, w.queue.seconds(now), w.queue.speed)
            for w in self._able(self.fleet.prefill, nodes, request.avoid, now)
        ]
        decode = [
            DecodeCandidate(w.id, w.node_id, w.room.blocks, w.room.total_blocks, w.room.sequences)
            for w in self._able(self.fleet.decode, nodes, request.avoid, now)
        ]
        prefixes = {n: k for n, k in self.index.longest_prefix(request.keys).items() if n in nodes}
        return View(prefill, decode, prefixes, self.links)

    def _able(
        self, workers: Mapping[str, AnyWorker], nodes: Mapping[str, str], avoid: Iterable[str], now: float
    ) -> list[AnyWorker]:
        """Workers that may get work; those that are being ramped up only within their ramp, unless there are no others."""
        live = [w for w in self.fleet.live(workers, nodes, now) if w.id not in avoid]
        return [w for w in live if w.ramp.allows(w.in_flight, now)] or live

    def _assign(self, request: RouteRequest, choice: Choice, prompt_blocks: int, growth_blocks: int, now: float) -> None:
        key = (request.request_id, request.attempt)
        prefill = self.fleet.prefill[choice.prefill.worker_id]
        prefill.queue.assign(key, choice.terms.compute_s, now)
        decode: DecodeWorker | None = None
        if request.max_new_tokens > 1:
            decode = self.fleet.decode[choice.decode.worker_id]
            decode.room.assign(key, prompt_blocks, growth_blocks, now)
        self.assignments.add(key, prefill, decode, now)

    def _plan(self, request: RouteRequest, choice: Choice) -> Plan:
        self.counters["plans"] += 1
        prefill, decode = choice.prefill, choice.decode
        return Plan(
            request.request_id,
            request.attempt,
            prefill.worker_id,
            decode.worker_id,
            choice.cached_blocks,
            None if choice.source is None else self._source(choice.source),
            None if prefill.node_id == decode.node_id else self._source(prefill.node_id),
            choice.terms,
        )

    def _source(self, node_id: str) -> BlockSource:
        return BlockSource(node_id, self.fleet.nodes[node_id].endpoint)

    def _refuse(self, request: RouteRequest, obstacle: Obstacle, now: float) -> Rejection:
        if obstacle.reason == "decode_full":
            return self._reject(request, "overloaded", RETRY_MIN_S, "no decode worker has room for it")
        role = "prefill" if obstacle.reason == "no_prefill" else "decode"
        workers = self.fleet.prefill if role == "prefill" else self.fleet.decode
        back_s = [w.quarantine.until - now for w in workers.values() if self.fleet.standing(w, now) is Standing.BLAMED]
        return self._reject(request, "no_worker", min(back_s, default=RETRY_MIN_S), f"no {role} worker may take it now")

    def _reject(self, request: RouteRequest, reason: str, retry_after_s: float, detail: str) -> Rejection:
        self.counters[f"rejections_{reason}"] += 1
        retry_after_s = min(max(retry_after_s, RETRY_MIN_S), RETRY_MAX_S)
        return Rejection(request.request_id, request.attempt, reason, retry_after_s, detail)

    # --- views ----------------------------------------------------------------------------------------------------------

    def view(self, now: float) -> dict[str, Any]:
        """Plain data for people and dashboards."""
        return {
            "in_flight": len(self.assignments),
            "index": {"entries": self.index.entries, "dropped": self.index.dropped, "ignored": self.index.ignored},
            "counters": dict(self.counters),
            **self.fleet.view(now),
        }
