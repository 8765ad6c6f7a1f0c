"""The simulated gateway: each request through its attempts, as the live one drives them, and what became of it in its record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cluster.gateway.settings import GatewaySettings
from cluster.simulator.records import Outcome, RequestRecord
from cluster.simulator.trace import Trace, TraceRequest, key_of
from cluster.simulator.world import Gaps, Handoff, PrefillFigures, RequestId, World
from decode_worker.task import DecodeTask
from engine.sampling.params import SamplingParams
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import FailureCause
from kv_pool.keys import BlockKey, CacheRoot
from prefill_worker.task import PrefillTask
from scheduler.messages import RequestEnded, WorkerFailed
from scheduler.plan import Plan, Rejection, RouteRequest

REQUEST_TIMEOUT_S: Final = 3600.0
LIMITS: Final = GatewaySettings(request_timeout_s=REQUEST_TIMEOUT_S)
"""The live gateway's, but that a request may wait through a long overload."""
ASK_AGAIN_MIN_S: Final = 0.2
NOBODYS_FAULT: Final = (FailureCause.DEADLINE, FailureCause.PREEMPTED, FailureCause.TOO_SLOW)


class Prefill(Protocol):
    def submit(self, task: PrefillTask) -> None: ...
    def abort(self, request: RequestId) -> None: ...


class Decode(Protocol):
    def submit(self, task: DecodeTask) -> None: ...
    def abort(self, request: RequestId) -> None: ...


class Scheduler(Protocol):
    def route(self, request: RouteRequest) -> Plan | Rejection: ...
    def tell(self, event: RequestEnded | WorkerFailed) -> None: ...


@dataclass(slots=True, eq=False)
class _Answer:
    record: RequestRecord
    request: TraceRequest
    keys: tuple[BlockKey, ...]
    token_ids: range
    attempt: int = -1
    plan: Plan | None = None
    planned_at: float = 0.0
    admitted: bool = False
    failures: int = 0
    preemptions: int = 0
    avoid: tuple[str, ...] = ()
    full_until: float = 0.0
    ended: bool = False
    broke_off_at: float | None = None
    """When an attempt ended whose first token the client has: what comes next comes after a pause."""
    pauses_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class GapTotals:
    """Token gaps of completed requests: tenths of a millisecond to how many."""

    counts: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, gaps: Gaps) -> None:
        for value, count in zip(gaps.values, gaps.counts, strict=True):
            tenths = round(value * 1e4)
            self.counts[tenths] = self.counts.get(tenths, 0) + count


class Gateway:
    """All requests of ``trace``, and the sums over them."""

    def __init__(self, world: World, trace: Trace, root: CacheRoot) -> None:
        self.records: list[RequestRecord] = []
        self.gaps = GapTotals()
        self.open = 0
        self.retries = 0
        self._world = world
        self._trace = trace
        self._root = root
        self._answers: dict[str, _Answer] = {}
        self._sink = TokenSink("simulated", "simulated")
        self._sampling = SamplingParams()
        self._at: dict[str, dict[str, None]] = {}
        """Worker to the requests whose open attempt is there."""
        self.prefill: dict[str, Prefill] = {}
        self.decode: dict[str, Decode] = {}
        self.scheduler: Scheduler
        self.node_of: Callable[[str], str]

    def arrive(self, request: TraceRequest) -> None:
        """A request comes in."""
        request_id = f"r{request.index}"
        record = RequestRecord(
            request.index, request_id, request.request_class, request.session, self._world.kernel.now,
            request.input_tokens, request.output_tokens,
        )  # fmt: skip
        self.records.append(record)
        keys = tuple([key_of(block) for block in self._trace.full_blocks(request)])
        answer = _Answer(record, request, keys, range(request.input_tokens))
        self._answers[request_id] = answer
        self.open += 1
        self._plan(answer)

    def worker_down(self, worker_id: str) -> None:
        for request_id in list(self._at.get(worker_id, ())):
            answer = self._answers.get(request_id)
            if answer is not None and answer.plan is not None:
                self._attempt_failed(answer, worker_id, FailureCause.INTERNAL, blame=False)

    # --- what workers tell ----------------------------------------------------------------------------------------------

    def first_token(self, request: RequestId, figures: PrefillFigures) -> None:
        answer = self._current(request)
        if answer is None:
            return
        record, now = answer.record, self._world.kernel.now
        if record.ttft_s is None:
            record.ttft_s = now - record.arrived_s
            record.queue_s, record.load_s, record.compute_s = figures.queue_s, figures.load_s, figures.compute_s
            record.dram_tokens, record.ssd_tokens = figures.dram_tokens, figures.ssd_tokens
            record.remote_tokens, record.device_tokens = figures.remote_tokens, figures.device_tokens
        elif answer.broke_off_at is not None:
            answer.pauses_s.append(now - answer.broke_off_at)
            answer.broke_off_at = None
        if answer.request.output_tokens == 1:
            self._completed(answer)

    def finished(self, request: RequestId, gaps: Gaps) -> None:
        answer = self._current(request)
        if answer is None:
            return
        gaps.values += answer.pauses_s
        gaps.counts += [1] * len(answer.pauses_s)
        self.gaps.add(gaps)
        record = answer.record
        record.handoff_s = gaps.handoff_s
        _note_gaps(record, gaps)
        self._completed(answer)

    def failed(self, request: RequestId, worker_id: str, cause: FailureCause, detail: str) -> None:
        answer = self._current(request)
        if answer is None:
            return
        if cause is FailureCause.TOO_SLOW:
            self._close(answer, worker_id)
            self._end(answer, Outcome.REJECTED_LATE, detail)
        else:
            self._attempt_failed(answer, worker_id, cause, blame=cause not in NOBODYS_FAULT)

    def stopped(self, request: RequestId) -> None:
        """Its decode worker has died. Nobody knows yet; the client hears nothing any more."""
        answer = self._current(request)
        if answer is not None:
            self._broke_off(answer)

    # --- attempts -------------------------------------------------------------------------------------------------------

    def _plan(self, answer: _Answer) -> None:
        if answer.ended:
            return
        record, now = answer.record, self._world.kernel.now
        if now - record.arrived_s > REQUEST_TIMEOUT_S:
            self._end(answer, Outcome.FAILED, "timed out")
            return
        answer.attempt += 1
        record.attempts += 1
        request = RouteRequest(
            record.request_id, answer.attempt, answer.keys, record.input_tokens, max(1, record.output_tokens),
            avoid=answer.avoid, request_class=record.request_class, admitted=answer.admitted,
        )  # fmt: skip
        found = self.scheduler.route(request)
        if isinstance(found, Plan):
            self._submit(answer, found)
        elif answer.avoid:
            answer.avoid = ()
            self._world.kernel.after(0.0, self._plan, answer)
        elif not answer.admitted or now >= answer.full_until:
            self._end(answer, Outcome.REJECTED if not answer.admitted else Outcome.FAILED, found.detail or found.reason)
        else:
            self._world.kernel.after(max(ASK_AGAIN_MIN_S, min(2.0, found.retry_after_s)), self._plan, answer)

    def _submit(self, answer: _Answer, plan: Plan) -> None:
        record, world = answer.record, self._world
        request = (record.request_id, answer.attempt)
        if record.predicted is None:
            record.predicted = plan.terms
        record.prefill_worker, record.decode_worker = plan.prefill_worker, plan.decode_worker
        answer.plan, answer.planned_at, answer.admitted = plan, world.kernel.now, True
        decodes = record.output_tokens > 1
        tail_key = key_of(2**127 + record.index)
        world.handoffs[request] = Handoff(answer.keys, world.nodes[self.node_of(plan.prefill_worker)])
        prefill = PrefillTask(
            record.request_id, answer.attempt, answer.token_ids, 0, answer.keys, plan.cached_blocks, plan.prefill_source,  # type: ignore[arg-type]
            tail_key, decodes, self._sampling, (), self._sink, REQUEST_TIMEOUT_S, plan.priority,
            load_max_blocks=plan.load_max_blocks,
        )  # fmt: skip
        self._at.setdefault(plan.prefill_worker, {})[record.request_id] = None
        world.kernel.after(world.profile.latency_s, self.prefill[plan.prefill_worker].submit, prefill)
        if decodes:
            decode = DecodeTask(
                record.request_id, answer.attempt, answer.token_ids, 0, answer.keys, tail_key, plan.decode_source, self._root,  # type: ignore[arg-type]
                record.output_tokens, self._sampling, (), self._sink, REQUEST_TIMEOUT_S, write_back=False,
                tpot_max_s=plan.tpot_max_s,
            )  # fmt: skip
            self._at.setdefault(plan.decode_worker, {})[record.request_id] = None
            world.kernel.after(world.profile.latency_s, self.decode[plan.decode_worker].submit, decode)

    def _attempt_failed(self, answer: _Answer, worker_id: str, cause: FailureCause, *, blame: bool) -> None:
        record = answer.record
        self._broke_off(answer)
        self._close(answer, worker_id)
        self.retries += 1
        if blame:
            self.scheduler.tell(WorkerFailed(worker_id, record.request_id))
        if cause is FailureCause.PREEMPTED:
            answer.preemptions += 1
        else:
            answer.failures += 1
            answer.avoid = (*answer.avoid, worker_id) if worker_id not in answer.avoid else answer.avoid
        if cause is FailureCause.DEADLINE:
            self._end(answer, Outcome.FAILED, "timed out")
        elif answer.failures >= LIMITS.attempts_max or answer.preemptions > LIMITS.preemptions_max:
            self._end(answer, Outcome.FAILED, f"gave up: {cause.value}")
        else:
            answer.full_until = self._world.kernel.now + LIMITS.replan_wait_s
            self._world.kernel.after(max(0, answer.failures - 1) * LIMITS.retry_backoff_s, self._plan, answer)

    def _broke_off(self, answer: _Answer) -> None:
        if answer.record.ttft_s is not None and answer.broke_off_at is None:
            answer.broke_off_at = self._world.kernel.now

    def _close(self, answer: _Answer, failed_at: str | None, output_tokens: int | None = None) -> None:
        """The attempt is over: the scheduler hears it, and the workers that would not know let go."""
        plan, record = answer.plan, answer.record
        if plan is None:
            return
        answer.plan = None
        request = (record.request_id, answer.attempt)
        self._world.handoffs.pop(request, None)
        ttft_s = None if record.ttft_s is None else record.arrived_s + record.ttft_s - answer.planned_at
        self.scheduler.tell(RequestEnded(*request, ttft_s if ttft_s is not None and ttft_s > 0 else None, output_tokens))
        for worker_id, workers in ((plan.prefill_worker, self.prefill), (plan.decode_worker, self.decode)):
            self._at.get(worker_id, {}).pop(record.request_id, None)
            if failed_at is not None:
                self._world.kernel.after(self._world.profile.latency_s, workers[worker_id].abort, request)

    def _completed(self, answer: _Answer) -> None:
        self._close(answer, None, answer.record.output_tokens)
        self._end(answer, Outcome.COMPLETED, "")

    def _end(self, answer: _Answer, outcome: Outcome, reason: str) -> None:
        assert not answer.ended, f"{answer.record.request_id} was answered twice"
        answer.ended = True
        answer.record.outcome, answer.record.reason = outcome, reason
        answer.record.finished_s = self._world.kernel.now
        del self._answers[answer.record.request_id]
        self.open -= 1

    def _current(self, request: RequestId) -> _Answer | None:
        """The answer, if it is this attempt that is under way."""
        answer = self._answers.get(request[0])
        return answer if answer is not None and answer.plan is not None and answer.attempt == request[1] else None


def _note_gaps(record: RequestRecord, gaps: Gaps) -> None:
    """Mean, percentile, maximum and the mean of the longest tenth of an answer's gaps."""
    ordered = sorted(zip(gaps.values, gaps.counts, strict=True), reverse=True)
    total = sum(count for _, count in ordered)
    if not total:
        return
    record.tbt_mean_s = sum(value * count for value, count in ordered) / total
    record.tbt_max_s = ordered[0][0]
    tenth = max(1, math.ceil(total / 10))
    past_99 = max(1, math.ceil(total / 100))
    taken, summed = 0, 0.0
    for value, count in ordered:
        if taken < past_99 <= taken + count:
            record.tbt_p99_s = value
        part = min(count, tenth - taken)
        if part > 0:
            summed += value * part
        taken += count
    record.tbt_worst_tenth_s = summed / tenth
