"""Drives every answer through its attempts: plan, submit to both workers at once, watch, and plan again where one fails.

An attempt is never waited for blindly: its submits, its events, the scheduler's notices and the clock all end in one place,
:class:`~cluster.gateway.inflight.InFlight`, and the driver of the answer wakes when that says that the attempt has ended.
Whatever way an answer ends (complete, failed, its client gone), both workers and the scheduler are told.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cluster.gateway.answer import AnswerText
from cluster.gateway.inflight import WORKER_AT_FAULT, Cause, Failure, InFlight, Patience
from cluster.gateway.job import Job, ServedModel
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.openai.errors import ApiError
from cluster.gateway.ports import ClusterPorts, PortError
from cluster.gateway.settings import GatewaySettings
from decode_worker.task import DecodeTask
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import Event
from kv_pool.keys import private_key
from prefill_worker.task import PrefillTask
from scheduler.plan import Plan, Rejection, RouteRequest

log = logging.getLogger(__name__)

RETRY_PERIOD_S: Final = 0.2
"""Between two questions to a scheduler that does not answer, and at least between two to one that has no room."""
RETRY_PERIOD_MAX_S: Final = 2.0
TOO_SLOW_RETRY_S: Final = 5.0
"""Where a decode worker found out that it cannot keep the time per token that was asked for."""


class Answer:
    """One answer under way, as its HTTP handler sees it: ``fresh`` is set when there is something to take, or an end."""

    def __init__(self, flight: InFlight, fresh: asyncio.Event) -> None:
        self.flight = flight
        self.fresh = fresh
        self.error: ApiError | None = None
        self.attempts = 0
        self.planned = False
        self._nudge = asyncio.Event()
        self._judged_at = float("inf")

    @property
    def over(self) -> bool:
        return self.error is not None or self.flight.finish_reason is not None

    def on_event(self, worker_id: str, event: Event, now: float) -> None:
        """Take one worker event; wakes the handler for news and the driver for an end or an earlier deadline."""
        self.flight.on_event(worker_id, event, now)
        self.fresh.set()
        if self.flight.ended or self.flight.judged_at < self._judged_at:
            self._nudge.set()

    def fail(self, attempt: int, failure: Failure) -> None:
        self.flight.fail(attempt, failure)
        self._nudge.set()

    def worker_down(self, worker_id: str) -> None:
        self.flight.worker_down(worker_id)
        self._nudge.set()

    async def attempt_ended(self, clock: Callable[[], float]) -> None:
        """Wait until the open attempt is complete or has failed; silence and the request's deadline count as failures."""
        while not self.flight.ended:
            self._nudge.clear()
            self._judged_at = self.flight.judged_at
            try:
                async with asyncio.timeout(max(0.0, self._judged_at - clock())):
                    await self._nudge.wait()
            except TimeoutError:
                self.flight.judge(clock())


class Dispatcher:
    """All answers of one gateway. Belongs to one event loop."""

    def __init__(
        self, ports: ClusterPorts, model: ServedModel, sink: TokenSink, settings: GatewaySettings, metrics: GatewayMetrics, *,
        eos_token_ids: tuple[int, ...], answer_text: Callable[[Job], AnswerText],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.sink = sink
        self.clock = clock
        self._ports = ports
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._eos = eos_token_ids
        self._answer_text = answer_text
        self._answers: dict[str, Answer] = {}
        self._background: set[asyncio.Task[Any]] = set()

    # --- for the HTTP layer ---------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    def prepare(self, job: Job, fresh: asyncio.Event) -> Answer:
        """The answer to ``job``, not started yet."""
        patience = Patience(self._settings.stall_timeout_s, self._settings.gap_timeout_s)
        flight = InFlight(
            job, self._answer_text(job), eos_token_ids=self._eos,
            block_tokens=self._model.block_tokens, patience=patience,
        )  # fmt: skip
        return Answer(flight, fresh)

    async def drive(self, answer: Answer) -> None:
        """Make ``answer``. Returns when it is over, its ``error`` set if it failed; cancelling gives everything back."""
        job = answer.flight.job
        self._answers[job.request_id] = answer
        try:
            await self._attempts(answer)
        except ApiError as error:
            answer.error = error
        except Exception as error:
            log.exception("answer failed for a reason of the gateway's own")
            answer.error = ApiError.internal(type(error).__name__)
        finally:
            del self._answers[job.request_id]
            answer.fresh.set()

    # --- for the token stream and the notices ---------------------------------------------------------------------------

    def on_events(self, sender: str, events: list[Event]) -> None:
        """One decoded token frame; ``sender`` is ``worker_id:incarnation``."""
        worker_id, now = sender.rpartition(":")[0], self.clock()
        for event in events:
            answer = self._answers.get(event.request_id)
            if answer is None:
                self._metrics.events_dropped.inc()
                continue
            try:
                answer.on_event(worker_id, event, now)
            except Exception:
                # Whatever it is, it costs this answer only, not the token stream of all others.
                log.exception("an event of %s could not be taken", worker_id)
                answer.fail(event.attempt, Failure(Cause.GATEWAY, None))

    def on_worker_down(self, worker_id: str) -> None:
        for answer in list(self._answers.values()):
            answer.worker_down(worker_id)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the calls that ended answers left behind (aborts, reports), at most ``timeout_s``."""
        if self._background:
            await asyncio.wait(set(self._background), timeout=timeout_s)

    # --- attempts -------------------------------------------------------------------------------------------------------

    async def _attempts(self, answer: Answer) -> None:
        flight, job, failures, preemptions = answer.flight, answer.flight.job, 0, 0
        avoid: list[str] = []
        while True:
            plan = await self._plan(answer, tuple(avoid))
            flight.begin(plan, self.clock())
            submits = self._submit(answer, plan)
            try:
                await answer.attempt_ended(self.clock)
            finally:
                self._close_attempt(answer, plan, submits)
            failure = flight.failure
            if failure is None:
                return
            self._metrics.retries.labels(failure.cause.value).inc()
            log.info("%s attempt %d failed: %s at %s", job.request_id, plan.attempt, failure.cause, failure.worker)
            if failure.cause is Cause.DEADLINE:
                raise ApiError.timed_out(self._settings.request_timeout_s)
            if failure.cause is Cause.TOO_SLOW:
                raise ApiError.overloaded(TOO_SLOW_RETRY_S)
            if failure.cause is Cause.GATEWAY:
                raise ApiError.internal("a token could not be taken")
            preemptions += failure.cause is Cause.PREEMPTED
            failures += failure.cause is not Cause.PREEMPTED
            if failures >= self._settings.attempts_max or preemptions > self._settings.preemptions_max:
                message = f"The cluster could not finish this answer in {answer.attempts} attempts."
                raise ApiError.unavailable(message, "attempts_exhausted")
            if failure.worker is not None and failure.worker not in avoid:
                avoid.append(failure.worker)
            # The first retry goes at once; if that fails too, the scheduler may need time to notice what happened.
            await self._pause(job, max(0, failures - 1) * self._settings.retry_backoff_s)

    async def _plan(self, answer: Answer, avoid: tuple[str, ...]) -> Plan:
        """Ask until there is a plan. A new request is turned away at once where there is no room, one under way waits."""
        job, now = answer.flight.job, self.clock()
        under_way = answer.planned
        unreachable_until = min(job.deadline, now + self._settings.scheduler_wait_s)
        full_until = min(job.deadline, now + self._settings.replan_wait_s) if under_way else now
        while True:
            try:
                reply = await self._route(answer, avoid)
            except PortError:
                if self.clock() >= unreachable_until:
                    raise ApiError.unavailable("The scheduler does not answer.", "no_scheduler") from None
                wait_s = RETRY_PERIOD_S
            else:
                if isinstance(reply, Plan):
                    answer.planned = True
                    return reply
                if avoid:  # better a worker that failed before than none
                    avoid = ()
                    continue
                if self.clock() >= full_until:
                    raise _rejected(reply)
                wait_s = min(max(reply.retry_after_s, RETRY_PERIOD_S), RETRY_PERIOD_MAX_S)
            await self._pause(job, wait_s)

    async def _pause(self, job: Job, seconds: float) -> None:
        """Sleep, but not past the request's deadline. Raises the error that is due then."""
        await asyncio.sleep(min(seconds, max(0.0, job.deadline - self.clock())))
        if self.clock() >= job.deadline:
            raise ApiError.timed_out(self._settings.request_timeout_s)

    async def _route(self, answer: Answer, avoid: tuple[str, ...]) -> Plan | Rejection:
        """One question. Each has an attempt number of its own: a late answer to an earlier one cannot be mistaken for it."""
        flight, attempt = answer.flight, answer.attempts
        answer.attempts += 1
        token_ids, keys = flight.sequence()
        left = flight.job.max_new_tokens - len(flight.tokens)
        wish = flight.job.wish
        request = RouteRequest(
            flight.job.request_id, attempt, keys, len(token_ids), left, wish.priority, avoid, request_class=wish.request_class,
            slo_ttft_s=wish.ttft_s, slo_tpot_s=wish.tpot_s, admitted=answer.planned,
        )  # fmt: skip
        try:
            return await self._ports.route(request)
        except (PortError, asyncio.CancelledError):
            # The scheduler may have planned it all the same.
            self._later(self._ports.finished(request.request_id, attempt))
            raise

    def _submit(self, answer: Answer, plan: Plan) -> dict[str, asyncio.Task[Any]]:
        """Send the tasks to both workers at once; the calls, by worker. One that does not get through fails the attempt."""
        flight, job = answer.flight, answer.flight.job
        token_ids, keys = flight.sequence()
        answered, attempt = len(flight.tokens), plan.attempt
        decodes = job.max_new_tokens - answered > 1
        tail_key = private_key(job.root, job.request_id, attempt)
        budget_s = max(0.0, job.deadline - self.clock())
        prefill = PrefillTask(
            job.request_id, attempt, token_ids, answered, keys, plan.cached_blocks, plan.prefill_source, tail_key,
            hand_over=decodes, sampling=job.sampling, eos_token_ids=self._eos, sink=self.sink, budget_s=budget_s,
            priority=plan.priority, reusable_only_at_chunks=self._model.bitwise, load_max_blocks=plan.load_max_blocks,
        )  # fmt: skip
        calls = {plan.prefill_worker: self._ports.submit_prefill(plan.prefill_worker, prefill)}
        if decodes:
            decode = DecodeTask(
                job.request_id, attempt, token_ids, answered, keys, tail_key, plan.decode_source, job.root, job.max_new_tokens,
                job.sampling, self._eos, self.sink, budget_s, write_back=not self._model.bitwise, tpot_max_s=plan.tpot_max_s,
            )  # fmt: skip
            calls[plan.decode_worker] = self._ports.submit_decode(plan.decode_worker, decode)
        return {worker_id: self._later(self._submitted(answer, attempt, worker_id, call)) for worker_id, call in calls.items()}

    async def _submitted(self, answer: Answer, attempt: int, worker_id: str, call: Coroutine[Any, Any, str | None]) -> None:
        try:
            refusal = await call
        except PortError:
            answer.fail(attempt, Failure(Cause.UNREACHABLE, worker_id))
        else:
            if refusal is not None:
                answer.fail(attempt, Failure(Cause.REFUSED, worker_id))

    def _close_attempt(self, answer: Answer, plan: Plan, submits: dict[str, asyncio.Task[Any]]) -> None:
        """Tell the scheduler that the pair is free of this attempt, and the workers to let go if they would not by themselves."""
        flight, request_id = answer.flight, answer.flight.job.request_id
        self._report_truth(flight, plan)
        failure = flight.failure
        if failure is not None and failure.worker is not None and failure.cause in WORKER_AT_FAULT:
            self._later(self._ports.report_failure(failure.worker, request_id))
        stop_string = flight.text.stopped
        if flight.finish_reason is not None and not stop_string:
            # Both workers end by themselves, but a decode worker that was not needed would wait for its hand-over.
            submits = {plan.decode_worker: submits[plan.decode_worker]} if self._decode_idle(flight, plan, submits) else {}
        for worker_id, submit in submits.items():
            self._later(self._abort(worker_id, request_id, plan.attempt, submit))

    def _report_truth(self, flight: InFlight, plan: Plan) -> None:
        """The pair is free; and what came of the prediction."""
        ttft_s = flight.first_token_after_plan_s
        if ttft_s is not None:
            self._metrics.predicted(plan.terms.ttft_s, ttft_s)
            _log_truth(flight, plan, ttft_s)
        output_tokens = len(flight.tokens) if flight.finish_reason is not None else None
        self._later(self._ports.finished(flight.job.request_id, plan.attempt, ttft_s, output_tokens))

    def _decode_idle(self, flight: InFlight, plan: Plan, submits: dict[str, asyncio.Task[Any]]) -> bool:
        return flight.ended_by_first_token and plan.decode_worker in submits

    async def _abort(self, worker_id: str, request_id: str, attempt: int, submit: asyncio.Task[Any]) -> None:
        await asyncio.wait({submit})  # an abort that overtook its submit would find nothing to abort
        await self._ports.abort(worker_id, request_id, attempt)

    def _later(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``call`` beside the answer that caused it. Every port call has its own deadline, so this ends."""
        task = asyncio.get_running_loop().create_task(_quiet(call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _log_truth(flight: InFlight, plan: Plan, ttft_s: float) -> None:
    """One line: each term of the plan beside what it was. Where the worker's report was lost, or is an earlier attempt's, that is
    not known."""
    done, terms = flight.timing.prefill, plan.terms
    known = done is not None and done.attempt == plan.attempt
    queue_s, load_s, compute_s = (done.queue_s, done.load_s, done.compute_s) if known and done else (math.nan,) * 3
    log.info(
        "%s/%d: first token after %.4f s, predicted %.4f; queue %.4f/%.4f load %.4f/%.4f (%.4f in the queue) compute %.4f/%.4f",
        flight.job.request_id, plan.attempt, ttft_s, terms.ttft_s, queue_s, terms.queue_s, load_s, terms.load_s, terms.overlap_s,
        compute_s, terms.compute_s,
    )  # fmt: skip


async def _quiet(call: Coroutine[Any, Any, Any]) -> None:
    try:
        await call
    except PortError as error:
        log.info("a call that nobody waits for did not get through: %s", error)
    except Exception:
        log.exception("a call that nobody waits for failed")


def _rejected(reply: Rejection) -> ApiError:
    if reply.reason == "overloaded":
        return ApiError.overloaded(reply.retry_after_s)
    return ApiError.unavailable("No worker can take this request now.", "no_worker", retry_after_s=reply.retry_after_s)
