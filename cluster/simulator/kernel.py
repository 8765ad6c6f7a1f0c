"""The simulated clock: a heap of calls ordered by (time, sequence). Nothing runs inline, so equal inputs give equal runs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Kernel:
    """``now`` is in simulated seconds. Calls that are due at one time run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` at ``time``, or now if that is past."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(time, self.now), self._sequence, call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def step(self) -> bool:
        """Run the next call; False where there is none."""
        if not self._heap:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        self.calls += 1
        call(*args)
        return True
