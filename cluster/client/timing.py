"""When the text of a streamed answer came, as its reader saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StreamTiming:
    """Seconds of one clock. ``pieces`` counts pieces of text, about one per token."""

    asked_at: float
    first_at: float | None = None
    last_at: float | None = None
    pieces: int = 0

    def mark(self, now: float) -> None:
        """A piece of text came."""
        if self.first_at is None:
            self.first_at = now
        self.last_at = now
        self.pieces += 1

    @property
    def ttft_s(self) -> float | None:
        """From asking to the first text."""
        return None if self.first_at is None else self.first_at - self.asked_at

    def tbt_s(self, tokens: int) -> float | None:
        """Mean time between two of an answer's ``tokens``."""
        if self.first_at is None or self.last_at is None or tokens < 2:
            return None
        return (self.last_at - self.first_at) / (tokens - 1)
