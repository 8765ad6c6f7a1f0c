"""Which sealed segment of the SSD log dies, whole, when room is needed and none is free. The log decides which *may* go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MOSTLY_DEAD_SHARE: Final = 0.5
"""A segment with less than this share of its bytes alive is worth less than what it keeps from being written."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A sealed segment without readers or writers. Times in wall-clock seconds; ``expires_at`` is its last record's,
    ``touched_at`` when it was sealed or last had a hit."""

    id: int
    retention: int
    live_bytes: int
    used_bytes: int
    expires_at: float
    touched_at: float


class SegmentPolicy(Protocol):
    def victim(self, segments: Sequence[SegmentFacts], now: float) -> int | None:
        """The id of one of ``segments``; None where all of them are worth more than what is to be written."""
        ...


class ExpiredThenDeadThenOldest:
    """What has expired first; then what is mostly dead, the fewest live bytes first; then least recently touched."""

    def victim(self, segments: Sequence[SegmentFacts], now: float) -> int | None:
        if not segments:
            return None
        return min(segments, key=lambda segment: self._rank(segment, now)).id

    def _rank(self, segment: SegmentFacts, now: float) -> tuple[int, float, float]:
        if segment.expires_at <= now:
            return 0, segment.expires_at, segment.touched_at
        if segment.live_bytes < MOSTLY_DEAD_SHARE * segment.used_bytes:
            return 1, segment.live_bytes, segment.touched_at
        return 2, segment.touched_at, segment.live_bytes
