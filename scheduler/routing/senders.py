"""Contention at the sender: how long a node is busy with what it was asked to send. Pure.

The hard part of a transfer's time is not its size but who else wants the same source (a hot prefix lies on one node, and ten
requests pull it at once). Each planned pull is counted at once, in seconds of the source's own link, first come, first served:

    wait(source) = max(0, busy_until(source) - now)

It is a belief: nobody reports when a pull really ended, and an over-estimate heals by itself as time passes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WAIT_MAX_S: Final = 60.0


class Senders:
    """By node slot."""

    def __init__(self) -> None:
        self._busy_until = np.zeros(8)

    def wait_s(self, now: float, slots: int) -> NDArray[np.float64]:
        """Seconds until each of ``slots`` slots can begin with one more pull."""
        self._grow(slots)
        return np.clip(self._busy_until[:slots] - now, 0.0, WAIT_MAX_S)

    def sends(self, slot: int, seconds: float, now: float) -> None:
        """A pull of ``seconds`` from ``slot`` was planned."""
        self._grow(slot + 1)
        self._busy_until[slot] = min(max(float(self._busy_until[slot]), now) + seconds, now + WAIT_MAX_S)

    def forget(self, slot: int) -> None:
        self._grow(slot + 1)
        self._busy_until[slot] = 0.0

    def _grow(self, slots: int) -> None:
        if slots > len(self._busy_until):
            self._busy_until = np.concatenate([self._busy_until, np.zeros(max(slots, len(self._busy_until)))])
