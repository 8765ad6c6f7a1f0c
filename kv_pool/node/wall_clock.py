"""The wall clock, told from outside. Pure. What outlives the process (expiry, the write budget) is counted in it; everything
else in the node's own monotonic ``now``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WallClock:
    """``offset`` is how far the wall clock is ahead of ``now``. It changes when somebody sets the clock, or the machine slept."""

    offset: float

    def at(self, now: float) -> float:
        return now + self.offset
