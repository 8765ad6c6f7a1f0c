"""Runs of like decode steps, and the token gaps that their sequences saw in them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from cluster.simulator.world import Gaps, RequestId
from decode_worker.state import Sequence


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """``steps`` steps from ``started`` on, as planned."""

    started: float
    batch: tuple[Sequence, ...]
    steps: int
    first_s: float
    growth_s: float

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + 0.5 * steps * (steps - 1) * self.growth_s

    def steps_until(self, elapsed: float) -> int:
        """Whole steps at the end of the one that is under way after ``elapsed`` seconds."""
        s, g = self.first_s, self.growth_s
        steps = elapsed / s if g <= 0 else (math.sqrt((s - g / 2) ** 2 + 2 * g * elapsed) - (s - g / 2)) / g
        whole = max(1, math.ceil(steps - 1e-9))
        return min(self.steps, whole)


@dataclass(frozen=True, slots=True)
class _Segment:
    """What a run left behind for the gaps of all that were in it."""

    steps: int
    first_gap_s: float
    rest_gap_s: float
    first_end: float


class GapLog:
    """The gaps of one worker's batch, kept once for all that were in it, for as long as one of them is there."""

    def __init__(self) -> None:
        self._last_end = 0.0
        self._segments: deque[_Segment] = deque()
        self._gone = 0
        self._joined: dict[RequestId, tuple[int, float, float]] = {}
        """First segment, time of the first token, time of joining."""

    def joined(self, request: RequestId, first_token_at: float, now: float) -> None:
        self._joined[request] = self._gone + len(self._segments), first_token_at, now

    def left(self, request: RequestId) -> None:
        self._joined.pop(request, None)

    def idle(self, now: float) -> None:
        """Nobody decodes: the next step is nobody's gap."""
        self._last_end = now

    def ran(self, run: DecodeRun, now: float) -> None:
        first_end = run.started + run.first_s
        rest = (now - first_end) / (run.steps - 1) if run.steps > 1 else 0.0
        self._segments.append(_Segment(run.steps, first_end - self._last_end, rest, first_end))
        self._last_end = now

    def gaps(self, request: RequestId) -> Gaps:
        since, first_token_at, joined_at = self._joined[request]
        since -= self._gone
        gaps = Gaps(handoff_s=joined_at - first_token_at)
        for place in range(since, len(self._segments)):
            segment = self._segments[place]
            gaps.values.append(segment.first_end - first_token_at if place == since else segment.first_gap_s)
            gaps.counts.append(1)
            if segment.steps > 1:
                gaps.values.append(segment.rest_gap_s)
                gaps.counts.append(segment.steps - 1)
        return gaps

    def forget(self) -> None:
        """Drop what nobody who is there has seen."""
        oldest = min((since for since, _, _ in self._joined.values()), default=self._gone + len(self._segments))
        while self._gone < oldest:
            self._segments.popleft()
            self._gone += 1
