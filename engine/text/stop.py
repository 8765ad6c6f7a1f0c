"""Stop strings in a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """``emit`` is text that can go out now; ``stopped`` says that a stop string came right after it."""

    emit: str
    stopped: bool


class StopChecker:
    """Holds back text that may be the beginning of a stop string; the stop string itself is never given out."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Take the next piece. After a stop nothing more is given out. Where several stop strings match, the earliest begins
        the stop."""
        if self._stopped:
            return StopResult("", stopped=True)
        self._held += text
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            emit, self._held, self._stopped = self._held[: min(found)], "", True
            return StopResult(emit, stopped=True)
        keep = self._possible_start()
        emit, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return StopResult(emit, stopped=False)

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        emit, self._held = self._held, ""
        return emit

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
