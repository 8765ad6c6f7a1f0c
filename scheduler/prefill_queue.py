"""How many seconds of work a prefill worker has been given and not done yet. Pure.

Three sources, each right where the others are not: our own estimates, counted at the moment of decision (reports are up to a
heartbeat old, and a burst of requests would all see the same idle worker); the worker's report of tokens left; and the clock,
since a worker that has work works.

Each open request also has its *precedence* (:func:`prefill_worker.task.precedence`, the worker's own rule): who would go before a
new request is what its wait is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prefill_worker.task import PrefillLoad
from scheduler.routing.prefill_speed import PrefillSpeed

IN_TRANSIT_S: Final = 1.0
"""A request younger than this may not be in the worker's report yet."""

RequestAttempt = tuple[str, int]
"""(request_id, attempt)."""


@dataclass(frozen=True, slots=True)
class Work:
    """One open request: predicted seconds, when it was assigned, and its place in the worker's order (smaller goes first)."""

    seconds: float
    assigned: float
    precedence: float


class PrefillQueue:
    """Open requests of one worker, oldest first."""

    def __init__(self, tokens_per_s: float) -> None:
        self.speed = PrefillSpeed(tokens_per_s)
        self.open: dict[RequestAttempt, Work] = {}
        self.open_s = 0.0
        """Sum of the estimates of all that is open."""
        self.left_s = 0.0
        self.as_of = 0.0
        """``left_s`` of work were left at ``as_of``."""
        self.piece_s = 0.0
        """Of one piece, as reported: what is under way is not interrupted."""

    def seconds(self, now: float) -> float:
        """Predicted seconds until the worker has done all that it was given."""
        return max(0.0, self.left_s - (now - self.as_of))

    def assign(self, request: RequestAttempt, compute_s: float, precedence: float, now: float) -> None:
        self.left_s, self.as_of = self.seconds(now) + compute_s, now
        self.open[request] = Work(compute_s, now, precedence)
        self.open_s += compute_s

    def end(self, request: RequestAttempt, now: float) -> None:
        """The request is computed or given up; unknown ones are ignored. What is left is at most the others' share."""
        work = self.open.pop(request, None)
        if work is not None:
            self.open_s -= work.seconds
        if not self.open:
            self.open_s = 0.0
        self.left_s, self.as_of = min(self.seconds(now), max(0.0, self.open_s)), now

    def report(self, load: PrefillLoad, now: float) -> None:
        """Learn from the finished ones (which the caller has ended), then set the queue to what the report allows."""
        for _, _, tokens, past, seconds in load.finished:
            self.speed.observe(tokens, past, seconds)
        self.piece_s = load.piece_s
        in_transit = [work.seconds for work in self.open.values() if work.assigned > now - IN_TRANSIT_S]
        prompts = max(1, load.waiting + load.running)
        # Prompt by prompt: the longest part of a long one's time is its attention to itself, not to the others.
        reported_s = prompts * self.speed.seconds(round(load.queued_tokens / prompts)) + sum(in_transit)
        self.open_s = sum(work.seconds for work in self.open.values())
        # A worker that has more than we know of (a restarted scheduler) is believed; else the smaller of two upper bounds.
        strangers = load.waiting + load.running > len(self.open)
        self.left_s, self.as_of = reported_s if strangers else min(reported_s, self.open_s), now
