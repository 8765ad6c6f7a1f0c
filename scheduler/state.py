"""The scheduler's decisions, behind two doors: ``handle(event, now) -> actions`` and ``route(request, now) -> Plan | Rejection``.

Pure and deterministic: ``now`` is an argument (seconds, monotonic), equal calls give equal answers. Nothing here may raise for
what the world does; what is not known or too late is ignored and counted in ``counters``.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

from decode_worker.task import DecodeLoad
from engine.serving.addresses import BlockSource
from prefill_worker.task import Order, PrefillLoad, precedence
from scheduler.admission.classes import ServiceClass, parse_classes
from scheduler.admission.forecast import batch_at, next_end
from scheduler.admission.gate import GATES, Forecast
from scheduler.admission.lengths import AnswerLengths
from scheduler.blame import BlameLedger
from scheduler.decode_room import Charge
from scheduler.fleet import Fleet
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
    SpeedsRecalled,
    Tick,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.promises import Promises
from scheduler.routing.registry import make_policy
from scheduler.routing.view import Choice, Need, Obstacle, Prefixes, View
from scheduler.snapshots import SnapshotSchedule
from scheduler.speeds import Speeds
from scheduler.truth import Planned, PredictionLog

IN_FLIGHT_MAX: Final = 65536
BLOCK_TOKENS_GUESS: Final = 64
"""Until a request shows the block size."""
STALL_S: Final = 1.0
"""A longer pause between two ticks is our own: nobody could be heard in it, so nobody was silent."""
RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 60.0


class SchedulerState:
    """All that one scheduler knows. ``order`` is that of the workers' queues. ``index``, ``fleet`` and ``assignments`` may be
    read by tests and views, never changed from outside."""

    def __init__(self, settings: SchedulerSettings, *, order: Order = "shortest", entries_max: int = ENTRIES_MAX) -> None:
        self.settings = settings
        self._order: Order = order
        self.index = BlockIndex(entries_max)
        self.counters: Counter[str] = Counter()
        self._promises = Promises()
        self.fleet = Fleet(settings, self.index, self._promises, self.counters)
        self.assignments = self.fleet.assignments
        self.truth = PredictionLog()
        self.lengths = AnswerLengths(settings.expected_output_tokens)
        self._classes = parse_classes(settings.classes)
        self._default_class = next(iter(self._classes.values()))
        self._gate = GATES[settings.admission]
        self._policy = make_policy(settings)
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
                self._request_ended(event, now)
                return []
            case WorkerFailed():
                self._worker_failed(event, now)
                return []
            case SpeedsRecalled():
                self.fleet.recall(event.speeds)
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
                for loaded in load.loads:
                    worker.loads.observe(*loaded)
                stuck = worker.progress.stuck(load.queued_tokens, len(load.finished), now, load.piece_s)
                if stuck and self.fleet.prefill_view(now, (worker.id,)).able.any():  # one that is slow is better than none
                    self._avoid(worker, now)
                    self.counters["workers_stuck"] += 1
                self._settle(worker, len(load.finished), idle=load.waiting + load.running == 0, now=now)
            case DecodeWorker(), DecodeLoad() as load:
                for request in load.finished:
                    self.assignments.end(request, now)
                for step in load.steps:
                    worker.step_time.observe(*step)
                worker.room.report(load, now)
                self._settle(worker, len(load.finished), idle=not load.sequences, now=now)
            case _:
                self.counters["reports_contradictory"] += 1
        return actions

    def _settle(self, worker: Worker, finished: int, *, idle: bool, now: float) -> None:
        if finished:
            worker.ramp.finished += finished
            worker.quarantine.failures = 0
        if idle:
            self.counters["requests_lost"] += self.assignments.drop_unknown(worker, now)
        self.fleet.touch(worker)

    def _request_ended(self, event: RequestEnded, now: float) -> None:
        attempt = (event.request_id, event.attempt)
        planned = self.truth.ended(attempt, event.ttft_s)
        if planned is not None and event.output_tokens is not None:
            self.lengths.observe(planned.request_class, event.output_tokens)
        self.assignments.end(attempt, now)

    def _worker_failed(self, event: WorkerFailed, now: float) -> None:
        worker = self.fleet.worker(event.worker_id)
        if worker is None:
            self.counters["blames_of_unknown"] += 1
        elif self._blame.counts(event.request_id):
            self._avoid(worker, now)
            self.counters["quarantines"] += 1

    def _avoid(self, worker: Worker, now: float) -> None:
        """Nothing for a while, and then little at first: what comes then is the probe."""
        worker.quarantine.blame(now)
        worker.ramp.begin(worker.quarantine.until)
        self.fleet.touch(worker)

    def _tick(self, now: float) -> list[Action]:
        if self._ticked_at is not None and now - self._ticked_at > STALL_S:
            self.fleet.forgive(now - self._ticked_at, now)
            self.counters["stalls"] += 1
        self._ticked_at = now
        self._snapshots.keep(self.fleet.nodes)
        self.counters["requests_expired"] += self.assignments.expire(now)
        self._promises.expire(now)
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
        target = self._target(request)
        need = self._need(request, target)
        view = self._view(request, now)
        found = self._policy.choose(need, view)
        if isinstance(found, Obstacle):
            return self._refuse(request, found, now)
        decode = self.fleet.decode[view.decode.ids[found.decode]]
        tpot_s = self._tpot(need, decode, now, now)
        if not request.admitted:
            verdict = self._gate.judge(target, self._forecast(need, found, decode, tpot_s, target, now))
            if not verdict.admit:
                return self._reject(request, "overloaded", verdict.retry_after_s, verdict.reason)
        return self._assign(request, target, need, view, found, tpot_s, now)

    def _target(self, request: RouteRequest) -> ServiceClass:
        """What the request asks for, else what its class has."""
        service = self._classes.get(request.request_class, self._default_class)
        return ServiceClass(
            service.name,
            service.ttft_s if request.slo_ttft_s is None else request.slo_ttft_s,
            service.tpot_s if request.slo_tpot_s is None else request.slo_tpot_s,
            service.priority + request.priority,
        )

    def _need(self, request: RouteRequest, target: ServiceClass) -> Need:
        if request.keys:
            # A power of two with tokens // block_tokens == len(keys): there is exactly one.
            self._block_tokens = 1 << (max(1, request.tokens // len(request.keys)).bit_length() - 1)
        size = self._block_tokens
        answer = self.lengths.expected(target.name, max(0, request.max_new_tokens))
        reusable = min(len(request.keys), max(0, request.tokens - 1) // size)
        # With one token to come, prefill's own is the whole answer and decode gets nothing.
        decode_blocks = -(-(request.tokens + round(answer)) // size) if request.max_new_tokens > 1 else 0
        return Need(request.tokens, size, self.fleet.block_bytes, reusable, decode_blocks, answer, target.priority)

    def _view(self, request: RouteRequest, now: float) -> View:
        blocks, dram_first = self.index.prefixes(request.keys)
        slots = len(blocks)
        prefixes = Prefixes(blocks, dram_first, self._promises.extend(blocks, request.keys))
        return View(
            self.fleet.prefill_view(now, request.avoid), self.fleet.decode_view(now, request.avoid), prefixes, self.fleet.links,
            self.fleet.senders.wait_s(now, slots), self.fleet.live_sources(now, slots), self._order, now,
        )  # fmt: skip

    def _tpot(self, need: Need, decode: DecodeWorker, at: float, now: float) -> float:
        """Seconds of a step at ``decode`` with this request, with those that will be there at ``at``."""
        sequences, context = batch_at(decode.room.open.values(), at, now, decode.room.rate(now))
        if at <= now:
            sequences, context = max(sequences, decode.room.running), max(context, decode.room.reported_context)
        return decode.step_time.seconds(sequences + 1, context + need.tokens)

    def _forecast(
        self, need: Need, found: Choice, decode: DecodeWorker, tpot_s: float, target: ServiceClass, now: float
    ) -> Forecast:  # fmt: skip
        if math.isinf(target.tpot_s):  # nobody asks
            return Forecast(found.terms.ttft_s, tpot_s, tpot_s, 0.0)
        then_s = self._tpot(need, decode, now + found.terms.ttft_s, now)
        return Forecast(found.terms.ttft_s, tpot_s, then_s, next_end(decode.room.open.values(), now) - now)

    def _assign(
        self, request: RouteRequest, target: ServiceClass, need: Need, view: View, found: Choice, tpot_s: float, now: float
    ) -> Plan:  # fmt: skip
        key = (request.request_id, request.attempt)
        prefill = self.fleet.prefill[view.prefill.ids[found.prefill]]
        compute_s = found.terms.compute_s
        order = float(precedence(self._order, now, compute_s, target.priority))
        prefill.queue.assign(key, compute_s, order, now)
        decode: DecodeWorker | None = None
        if request.max_new_tokens > 1:
            decode = self.fleet.decode[view.decode.ids[found.decode]]
            starts_at = now + found.terms.ttft_s
            prompt_blocks = -(-request.tokens // need.block_tokens)
            charge = Charge(
                starts_at, starts_at + need.expected_output * tpot_s, request.tokens + round(need.expected_output / 2),
                prompt_blocks, need.decode_blocks - prompt_blocks, now,
            )  # fmt: skip
            decode.room.assign(key, charge)
        slot = self.index.slot_of(prefill.node_id)
        # Pulled blocks are new there too, and without them what follows would not hang together.
        there = min(found.cached_blocks, int(view.prefixes.blocks[slot]))
        self._promises.add(key, slot, request.keys[there:])
        if found.source is not None:
            self.fleet.senders.sends(found.source, found.pull_s, now)
        self.assignments.add(key, prefill, decode, now)
        self.truth.planned(key, Planned(found.terms.ttft_s, target.name))
        self.counters["plans"] += 1
        decode_id, decode_node = view.decode.ids[found.decode], self.fleet.decode[view.decode.ids[found.decode]].node_id
        return Plan(
            request.request_id,
            request.attempt,
            prefill.id,
            decode_id,
            found.cached_blocks,
            None if found.source is None else self._source(self.index.node_at(found.source)),
            None if prefill.node_id == decode_node else self._source(prefill.node_id),
            found.terms,
            found.load_max_blocks,
            target.priority,
            # A forecast errs: one sequence too many would make every token of the batch late, so the decode worker looks again.
            target.tpot_s if math.isfinite(target.tpot_s) else None,
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

    def learnt(self) -> Speeds:
        """The speeds of workers and links, to be told to the next scheduler (``SpeedsRecalled``). Changes nothing."""
        return self.fleet.learnt()

    # --- views ----------------------------------------------------------------------------------------------------------

    def view(self, now: float) -> dict[str, Any]:
        """Plain data for people and dashboards."""
        return {
            "in_flight": len(self.assignments),
            "index": {"entries": self.index.entries, "dropped": self.index.dropped, "ignored": self.index.ignored},
            "promised": len(self._promises),
            "prediction": self.truth.view(),
            "counters": dict(self.counters),
            **self.fleet.view(now),
        }
