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
    """Holds back text that may be the beginning of a stop string; the stop string itself is never given out.

    The stop string that is complete first ends the answer; of several that end at the same character, the longest. So the result
    depends on the text alone, not on how it was cut into pieces (which depends on timing).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Take the next piece. After a stop nothing more is given out."""
        if self._stopped:
            return StopResult("", stopped=True)
        held = self._held + text
        found = [(at + len(s), at) for s in self._stop if (at := held.find(s)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return StopResult(held[: min(found)[1]], stopped=True)
        out = len(held) - self._possible_start(held)
        self._held = held[out:]
        return StopResult(held[:out], stopped=False)

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        emit, self._held = self._held, ""
        return emit

    def _possible_start(self, held: str) -> int:
        """Length of the longest end of ``held`` that begins some stop string."""
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            if any(s.startswith(held[-length:]) for s in self._stop):
                return length
        return 0
