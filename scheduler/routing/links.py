"""How fast one node pulls blocks from another, learned from finished pulls. Pure. Nodes are slots of the block index."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WEIGHT: Final = 0.2
"""Of the newest pull in the moving average."""
SOURCES_MAX: Final = 4096
SAMPLE_BYTES_MIN: Final = 64 * 1024
"""Smaller pulls measure latency, not the link."""
SPEED_MIN: Final = 1e4
SPEED_MAX: Final = 1e12

Floats = NDArray[np.float64]


class LinkSpeeds:
    """Bytes per second from a source slot to a target slot; ``first_guess`` until a link was measured."""

    def __init__(self, first_guess: float) -> None:
        self.first_guess = first_guess
        self._rows: dict[int, Floats] = {}
        self._out = np.full(8, first_guess)

    def from_slot(self, source: int, slots: int) -> Floats:
        """From ``source`` to each of ``slots`` slots."""
        row = self._rows.get(source)
        if row is None:
            return np.full(slots, self.first_guess)
        if len(row) < slots:
            row = self._rows[source] = np.concatenate([row, np.full(slots - len(row), self.first_guess)])
        return row[:slots]

    def out(self, slots: int) -> Floats:
        """From each of ``slots`` slots to wherever: the moving average over its pulls."""
        if slots > len(self._out):
            self._out = np.concatenate([self._out, np.full(max(slots, len(self._out)), self.first_guess)])
        return self._out[:slots]

    def observe(self, source: int, target: int, size: float, seconds: float) -> None:
        """``size`` bytes came from ``source`` to ``target`` in ``seconds``. The moving averages are of seconds per byte, since
        times add up and speeds do not."""
        if source < 0 or target < 0 or size < SAMPLE_BYTES_MIN or not 0.0 < seconds < float("inf"):
            return
        if source not in self._rows and len(self._rows) >= SOURCES_MAX:
            return
        row = self.from_slot(source, target + 1)
        if source not in self._rows:
            self._rows[source] = row
        row[target] = _average(float(row[target]), seconds / size)
        out = self.out(source + 1)
        out[source] = _average(float(out[source]), seconds / size)

    def recall(self, source: int, target: int, speed: float) -> None:
        """Take a speed learnt earlier in place of the first guess of one link. Ignored where the link has another one."""
        if source not in self._rows and len(self._rows) >= SOURCES_MAX:
            return
        row = self.from_slot(source, target + 1)
        self._rows.setdefault(source, row)
        if row[target] == self.first_guess:
            self._rows[source][target] = speed

    def recall_out(self, source: int, speed: float) -> None:
        """As :meth:`recall`, of a source to wherever."""
        out = self.out(source + 1)
        if out[source] == self.first_guess:
            out[source] = speed

    def learnt(self, links_max: int) -> list[tuple[int, int, float]]:
        """(source, target, bytes per second) of links that are known better than by the first guess, at most ``links_max``."""
        found: list[tuple[int, int, float]] = []
        for source, row in self._rows.items():
            targets = np.flatnonzero(row != self.first_guess)[: links_max - len(found)]
            found += [(source, target, float(row[target])) for target in targets.tolist()]
            if len(found) >= links_max:
                break
        return found

    def learnt_out(self) -> list[tuple[int, float]]:
        """(source, bytes per second) likewise, to wherever."""
        return [(slot, float(self._out[slot])) for slot in np.flatnonzero(self._out != self.first_guess).tolist()]

    def forget(self, slot: int) -> None:
        """The node is gone, or came back as another process."""
        self._rows.pop(slot, None)
        self.out(slot + 1)[slot] = self.first_guess
        for row in self._rows.values():
            if slot < len(row):
                row[slot] = self.first_guess


def _average(speed: float, seconds_per_byte: float) -> float:
    per_byte = (1 - WEIGHT) / speed + WEIGHT * seconds_per_byte
    return min(max(1.0 / per_byte, SPEED_MIN), SPEED_MAX)
