"""What was predicted against what happened. Pure.

The gateway tells the truth when an answer is over. By then a worker's heartbeat may have ended the request in all books, so what
was planned is remembered here until the truth comes, or until there are too many later ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

from scheduler.prefill_queue import RequestAttempt

KEPT: Final = 1024
TTFT_MIN_S: Final = 1e-3
"""Below this an error in per cent says nothing."""


AWAITED_MAX: Final = 65_536
"""Plans of which the truth may still come: as many as may be under way."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What the truth is held against. ``request_class`` is the name of its service class."""

    ttft_s: float
    request_class: str


class PredictionLog:
    """The last ``KEPT`` requests that had a first token."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """(predicted, actual) seconds."""
        self._awaited: OrderedDict[RequestAttempt, Planned] = OrderedDict()
        self.count = 0

    def planned(self, request: RequestAttempt, planned: Planned) -> None:
        """The truth about ``request`` may come. Where too many are awaited, the oldest is not any more."""
        self._awaited[request] = planned
        if len(self._awaited) > AWAITED_MAX:
            self._awaited.popitem(last=False)

    def ended(self, request: RequestAttempt, ttft_s: float | None) -> Planned | None:
        """``request`` had its first token ``ttft_s`` after its plan (None: it had none). Returns what was planned, None where
        that is not known, or not any more: the truth is told once."""
        planned = self._awaited.pop(request, None)
        if planned is not None and ttft_s is not None and 0.0 <= ttft_s < float("inf"):
            self._kept.append((planned.ttft_s, ttft_s))
            self.count += 1
        return planned

    def errors(self) -> list[float]:
        """Absolute error over the actual time, oldest first."""
        return [abs(predicted - actual) / max(actual, TTFT_MIN_S) for predicted, actual in self._kept]

    def view(self) -> dict[str, Any]:
        """Plain data: how many, and the median and 90th percentile of the relative error of the last ones."""
        errors = self.errors()
        if not errors:
            return {"count": self.count, "error_p50": None, "error_p90": None}
        p90 = quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
        return {"count": self.count, "error_p50": median(errors), "error_p90": p90}
