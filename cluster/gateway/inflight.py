"""One answer under way: which tokens it has, which attempt may add to them, and whether that attempt is still alive.

Pure: worker events and the time in; tokens, an end or a failure out. The rules that make the answer exact:

* Only events of the open attempt count, and only from the two workers of its plan.
* Token ``i`` is taken exactly when ``i`` tokens are there. A lower index is a repetition and dropped; a higher one (its frame
  came by another socket and overtook) waits in ``ahead``. A gap that stays open means lost frames: the attempt fails.
* The end is read off the tokens (end-of-sequence, length, stop string), never believed: a worker's ``Finished`` before that is
  a gap too.
* A new attempt starts from the prompt and exactly the tokens taken so far.

::

    index       0 ............ len(tokens) ........ max_new_tokens
                |-- taken ----|  |ahead|   |ahead|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.gateway.answer import AnswerPart, AnswerText
from cluster.gateway.job import Job
from engine.serving.token_stream import (
    DecodeStarted,
    Event,
    Failed,
    FailureCause,
    Finished,
    PrefillDone,
    TokenLogprob,
    Tokens,
)
from kv_pool.keys import BlockChain, BlockKey
from scheduler.plan import Plan

PREDICTIONS_WAITED = 3.0
"""How many times the plan's predicted time to first token may pass, on top of the stall timeout, before the first token."""

TOKEN_IDS = 2**31
"""Bound of what can be a token at all. (A model's own vocabulary may be padded beyond its tokenizer's.)"""


class Cause(StrEnum):
    """Why an attempt failed."""

    HANDOFF = "handoff"
    PREEMPTED = "preempted"
    REFUSED = "refused"
    DEADLINE = "deadline"
    TOO_SLOW = "too_slow"  # the decode worker cannot keep the time per token that was asked for
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"  # a submit did not get through
    WORKER_DOWN = "worker_down"  # the scheduler says so
    STALLED = "stalled"  # no event for too long
    FRAMES_LOST = "frames_lost"  # a gap in the tokens that did not close
    GATEWAY = "gateway"  # our own code could not take an event: what the client has may be wrong from here on, so no retry


WORKER_AT_FAULT = frozenset({Cause.INTERNAL, Cause.UNREACHABLE, Cause.STALLED})
"""Causes that the scheduler should hear about (a worker that is down it knows already)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``worker``: who failed, None where nobody in particular did."""

    cause: Cause
    worker: str | None


@dataclass(slots=True)
class Patience:
    """Seconds of silence that are borne."""

    stall_s: float
    gap_s: float


@dataclass(slots=True)
class Timing:
    """What is told to the metrics. Seconds; gaps are the times between tokens."""

    first_token_at: float | None = None
    last_token_at: float | None = None
    prefill: PrefillDone | None = None
    """The first attempt's report that came: it says what of the prompt was cached."""
    handoff_s: float | None = None
    gaps_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class _Attempt:
    number: int
    plan: Plan
    heard_at: float
    first_token_wait_s: float
    answered: int
    ahead: dict[int, tuple[int, TokenLogprob | None]] = field(default_factory=dict[int, "tuple[int, TokenLogprob | None]"])
    finish_claimed: bool = False
    gap_since: float | None = None
    prefill_over: bool = False


class InFlight:
    """State of one sub-request. ``finish_reason`` and ``failure`` are how the open attempt ended; both None while it runs."""

    def __init__(
        self,
        job: Job,
        text: AnswerText,
        *,
        eos_token_ids: tuple[int, ...],
        block_tokens: int,
        patience: Patience,
    ) -> None:
        self.job = job
        self.text = text
        self.tokens: list[int] = []
        self.timing = Timing()
        self.finish_reason: str | None = None
        self.failure: Failure | None = None
        self.dropped = 0
        """Events that did not count: of given-up attempts, from strangers, out of range."""
        self._eos: frozenset[int] = frozenset() if job.sampling.ignore_eos else frozenset(eos_token_ids)
        self._patience = patience
        self._attempt: _Attempt | None = None
        self._begun_at = 0.0
        tail = len(job.prompt_ids) % block_tokens
        self._chain = BlockChain.resumed(job.root, block_tokens, job.keys, job.prompt_ids[len(job.prompt_ids) - tail :])
        self._chained = 0

    # --- attempts -------------------------------------------------------------------------------------------------------

    def sequence(self) -> tuple[tuple[int, ...], tuple[BlockKey, ...]]:
        """The tokens that the next attempt starts from (prompt, then what is answered) and the keys of their full blocks."""
        self._chain.extend(self.tokens[self._chained :])
        self._chained = len(self.tokens)
        return (*self.job.prompt_ids, *self.tokens), tuple(self._chain.keys)

    def begin(self, plan: Plan, now: float) -> None:
        """Open the attempt ``plan.attempt``; events of all others are dropped from here on."""
        assert self.finish_reason is None
        wait_s = self._patience.stall_s + PREDICTIONS_WAITED * max(0.0, plan.terms.ttft_s)
        self.failure = None
        self._attempt = _Attempt(plan.attempt, plan, now, wait_s, answered=len(self.tokens))
        self._begun_at = now

    @property
    def first_token_after_plan_s(self) -> float | None:
        """Seconds from the last plan to the answer's first token; None where that came before or not at all."""
        first = self.timing.first_token_at
        return None if first is None or first < self._begun_at else first - self._begun_at

    def fail(self, attempt: int, failure: Failure) -> None:
        """The attempt is over, if it is the open one: nothing it sends counts any more."""
        if self.finish_reason is None and self._attempt is not None and self._attempt.number == attempt:
            self._attempt = None
            self.failure = failure

    def worker_down(self, worker_id: str) -> None:
        """A worker is gone. A prefill worker whose part is done is not missed."""
        attempt = self._attempt
        if attempt is None:
            return
        needed = {attempt.plan.decode_worker} if attempt.prefill_over else self._pair(attempt)
        if worker_id in needed:
            self.fail(attempt.number, Failure(Cause.WORKER_DOWN, worker_id))

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def ended_by_first_token(self) -> bool:
        """The answer is complete, and the open attempt's decode worker had no part in it."""
        return self._attempt is not None and not self._attempt.prefill_over

    # --- time -----------------------------------------------------------------------------------------------------------

    @property
    def judged_at(self) -> float:
        """When :meth:`judge` must be called, unless something happens before. Seconds of the same clock as ``now``."""
        attempt = self._attempt
        if attempt is None:
            return self.job.deadline
        silent_until = attempt.heard_at + self._silence_borne(attempt)
        gap_until = silent_until if attempt.gap_since is None else attempt.gap_since + self._patience.gap_s
        return min(silent_until, gap_until, self.job.deadline)

    def judge(self, now: float) -> None:
        """Fail the open attempt if the request's time is over, a gap stayed open, or it was silent for too long."""
        attempt = self._attempt
        if attempt is None:
            return
        waits_for = attempt.plan.prefill_worker if len(self.tokens) == attempt.answered else attempt.plan.decode_worker
        if now >= self.job.deadline:
            self.fail(attempt.number, Failure(Cause.DEADLINE, None))
        elif attempt.gap_since is not None and now >= attempt.gap_since + self._patience.gap_s:
            self.fail(attempt.number, Failure(Cause.FRAMES_LOST, None))
        elif now >= attempt.heard_at + self._silence_borne(attempt):
            self.fail(attempt.number, Failure(Cause.STALLED, waits_for))

    # --- events ---------------------------------------------------------------------------------------------------------

    def on_event(self, worker_id: str, event: Event, now: float) -> None:
        """One event of a token frame from ``worker_id``."""
        attempt = self._attempt
        if self.finish_reason is not None:
            return
        if attempt is None or event.attempt != attempt.number or worker_id not in self._pair(attempt):
            self.dropped += 1
            return
        attempt.heard_at = now
        if worker_id == attempt.plan.decode_worker and isinstance(event, DecodeStarted | Tokens):
            attempt.prefill_over = True
        match event:
            case Tokens():
                self._on_tokens(attempt, worker_id, event, now)
            case PrefillDone():
                self.timing.prefill = self.timing.prefill or event
            case DecodeStarted():
                self.timing.handoff_s = event.handoff_s
            case Finished():
                attempt.finish_claimed = True
                self._watch_gap(attempt, now)
            case Failed():
                self._on_failed(attempt, worker_id, event.cause)

    def take(self) -> AnswerPart | None:
        """Text and log-probabilities that the client has not been given yet, or None."""
        return self.text.take()

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _on_tokens(self, attempt: _Attempt, worker_id: str, event: Tokens, now: float) -> None:
        count, logprobs = len(event.token_ids), event.logprobs or (None,) * len(event.token_ids)
        in_answer = event.index >= 0 and event.index + count <= self.job.max_new_tokens and len(logprobs) == count
        if not in_answer or not all(0 <= token < TOKEN_IDS for token in event.token_ids):
            self.fail(attempt.number, Failure(Cause.INTERNAL, worker_id))
            return
        for index, token in enumerate(zip(event.token_ids, logprobs, strict=True), start=event.index):
            if index >= len(self.tokens):
                attempt.ahead[index] = token
        while not self.finish_reason and (token := attempt.ahead.pop(len(self.tokens), None)) is not None:
            self._take_token(*token, now)
        self._watch_gap(attempt, now)

    def _take_token(self, token_id: int, logprob: TokenLogprob | None, now: float) -> None:
        self.tokens.append(token_id)
        timing = self.timing
        if timing.last_token_at is None:
            timing.first_token_at = now
        else:
            timing.gaps_s.append(now - timing.last_token_at)
        timing.last_token_at = now
        if token_id in self._eos:
            self._finish("stop")
            return
        self.text.push(token_id, logprob if self.job.sampling.logprobs is not None else None)
        if self.text.stopped:
            self._finish("stop")
        elif len(self.tokens) == self.job.max_new_tokens:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        self.text.end()
        # What was held back at the end of the answer may complete a stop string after all.
        self.finish_reason = "stop" if self.text.stopped else reason

    def _watch_gap(self, attempt: _Attempt, now: float) -> None:
        if self.finish_reason is not None or not (attempt.ahead or attempt.finish_claimed):
            attempt.gap_since = None
        elif attempt.gap_since is None:
            attempt.gap_since = now

    def _on_failed(self, attempt: _Attempt, worker_id: str, cause: FailureCause) -> None:
        if attempt.prefill_over and worker_id != attempt.plan.decode_worker:
            self.dropped += 1  # decode has all that it needs; what the prefill side failed at afterwards does not matter
            return
        nobody = cause in (FailureCause.DEADLINE, FailureCause.PREEMPTED, FailureCause.TOO_SLOW)
        self.fail(attempt.number, Failure(Cause(cause.value), None if nobody else worker_id))

    def _silence_borne(self, attempt: _Attempt) -> float:
        return attempt.first_token_wait_s if len(self.tokens) == attempt.answered else self._patience.stall_s

    def _pair(self, attempt: _Attempt) -> set[str]:
        return {attempt.plan.prefill_worker, attempt.plan.decode_worker}
