"""What was predicted against what happened. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median, quantiles
from typing import Any, Final

from scheduler.plan import PlanTerms

KEPT: Final = 1024
TTFT_MIN_S: Final = 1e-3
"""Below this an error in per cent says nothing."""


class PredictionLog:
    """The last ``KEPT`` requests that had a first token."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """(predicted, actual) seconds."""
        self.count = 0

    def ended(self, terms: PlanTerms, ttft_s: float) -> None:
        """A request planned with ``terms`` had its first token after ``ttft_s``."""
        if 0.0 <= ttft_s < float("inf"):
            self._kept.append((terms.ttft_s, ttft_s))
            self.count += 1

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
