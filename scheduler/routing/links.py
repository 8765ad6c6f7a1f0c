"""How fast one node pulls blocks from another, learned from finished pulls. Pure."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.2
"""Of the newest pull in the moving average."""
LINKS_MAX: Final = 65536
SAMPLE_BYTES_MIN: Final = 64 * 1024
"""Smaller pulls measure latency, not the link."""
SPEED_MIN: Final = 1e4
SPEED_MAX: Final = 1e12


class LinkSpeeds:
    """Bytes per second from a source node to a target node; ``bytes_per_s`` until a link was measured."""

    def __init__(self, bytes_per_s: float) -> None:
        self._first_guess = bytes_per_s
        self._measured: dict[tuple[str, str], float] = {}

    def bytes_per_s(self, source: str, target: str) -> float:
        return self._measured.get((source, target), self._first_guess)

    def observe(self, source: str, target: str, size: float, seconds: float) -> None:
        """``size`` bytes came from ``source`` to ``target`` in ``seconds``. The moving average is of seconds per byte, since
        times add up and speeds do not."""
        link = (source, target)
        if size < SAMPLE_BYTES_MIN or not 0.0 < seconds < float("inf"):
            return
        if link not in self._measured and len(self._measured) >= LINKS_MAX:
            return
        per_byte = (1 - WEIGHT) / self.bytes_per_s(source, target) + WEIGHT * seconds / size
        self._measured[link] = min(max(1.0 / per_byte, SPEED_MIN), SPEED_MAX)

    def forget(self, node_id: str) -> None:
        """A node is gone, or came back as another process."""
        for link in [link for link in self._measured if node_id in link]:
            del self._measured[link]
