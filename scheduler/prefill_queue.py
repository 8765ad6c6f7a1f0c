"""How many seconds of work a prefill worker has been given and not done yet. Pure.

Three sources, each right where the others are not: our own estimates, counted at the moment of decision (reports are up to a
heartbeat old, and a burst of requests would all see the same idle worker); the worker's report of tokens left; and the clock,
since a worker that has work works.
"""

from __future__ import annotations

from typing import Final

from prefill_worker.task import PrefillLoad
from scheduler.routing.prefill_speed import PrefillSpeed

IN_TRANSIT_S: Final = 1.0
"""A request younger than this may not be in the worker's report yet."""

RequestAttempt = tuple[str, int]
"""(request_id, attempt)."""


class PrefillQueue:
    """Open requests of one worker with their predicted compute seconds."""

    def __init__(self, tokens_per_s: float) -> None:
        self.speed = PrefillSpeed(tokens_per_s)
        self.open: dict[RequestAttempt, tuple[float, float]] = {}
        """Request to (predicted seconds, when it was assigned), oldest first."""
        self._open_s = 0.0
        self._left_s = 0.0
        self._as_of = 0.0

    def seconds(self, now: float) -> float:
        """Predicted seconds until the worker has done all that it was given."""
        return max(0.0, self._left_s - (now - self._as_of))

    def assign(self, request: RequestAttempt, compute_s: float, now: float) -> None:
        self._left_s, self._as_of = self.seconds(now) + compute_s, now
        self.open[request] = (compute_s, now)
        self._open_s += compute_s

    def end(self, request: RequestAttempt, now: float) -> None:
        """The request is computed or given up; unknown ones are ignored. What is left is at most the others' share."""
        self._open_s -= self.open.pop(request, (0.0, now))[0]
        if not self.open:
            self._open_s = 0.0
        self._left_s, self._as_of = min(self.seconds(now), max(0.0, self._open_s)), now

    def report(self, load: PrefillLoad, now: float) -> None:
        """Learn from the finished ones (which the caller has ended), then set the queue to what the report allows."""
        for _, _, tokens, past, seconds in load.finished:
            self.speed.observe(tokens, past, seconds)
        in_transit = [estimate for estimate, assigned in self.open.values() if assigned > now - IN_TRANSIT_S]
        reported_s = self.speed.seconds(load.queued_tokens) + sum(in_transit)
        self._open_s = sum(estimate for estimate, _ in self.open.values())
        # A worker that has more than we know of (a restarted scheduler) is believed; else the smaller of two upper bounds.
        strangers = load.waiting + load.running > len(self.open)
        self._left_s, self._as_of = reported_s if strangers else min(reported_s, self._open_s), now
