"""One figure of a benchmark: its value, what stands beside it, the target it is held against, and its spread."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Final

REPEATS_MIN: Final = 5
"""A median of fewer says little on a shared machine."""


@dataclass(frozen=True, slots=True)
class Target:
    """``at_most`` or ``at_least`` a number, of the row's ratio where it has one, else of its value."""

    limit: float
    at_most: bool

    def holds(self, figure: float) -> bool:
        return figure <= self.limit if self.at_most else figure >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


def at_most(limit: float) -> Target:
    return Target(limit, at_most=True)


def at_least(limit: float) -> Target:
    return Target(limit, at_most=False)


@dataclass(frozen=True, slots=True)
class Spread:
    """10th and 90th percentile of the repeats: the noise."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """``reference`` is the figure that stands beside ``value`` in the same unit, measured in the same run, and ``beside`` says
    whose it is. ``ratio`` is value over reference, the median over the rounds in which both took their turn.

    Raises ValueError for a figure that is not finite: a target would compare with it wrongly and JSON has no word for it.
    """

    name: str
    value: float
    unit: str
    reference: float | None = None
    beside: str = ""
    ratio: float | None = None
    target: Target | None = None
    spread: Spread | None = None
    ratio_spread: Spread | None = None
    skipped: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        if not all(math.isfinite(figure) for figure in (self.value, self.reference or 0.0, self.ratio or 0.0)):
            raise ValueError(f"{self.name}: {self.value}, {self.reference}, {self.ratio} must be finite")

    @property
    def measured(self) -> bool:
        return not self.skipped and not self.error

    @property
    def holds(self) -> bool | None:
        """None where there is no target, or nothing was measured."""
        if self.target is None or not self.measured:
            return None
        return self.target.holds(self.value if self.ratio is None else self.ratio)

    @property
    def good(self) -> bool:
        """False for a missed target and for a crash; a skip is neither."""
        return not self.error and self.holds is not False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value if self.measured else None,
            "unit": self.unit,
            "reference": self.reference,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "holds": self.holds,
            "beside": self.beside or None,
            "low": self.spread and self.spread.low,
            "high": self.spread and self.spread.high,
            "ratio_low": self.ratio_spread and self.ratio_spread.low,
            "ratio_high": self.ratio_spread and self.ratio_spread.high,
            "skipped": self.skipped or None,
            "error": self.error or None,
        }


def skipped(name: str, reason: str) -> Row:
    """A row that cannot be measured here: shown, and no failure."""
    return Row(name, 0.0, "", skipped=reason)


def crashed(name: str, reason: str) -> Row:
    """A row whose benchmark did not come to its end: shown, and a failure."""
    return Row(name, 0.0, "", error=reason)


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeats of one measurement, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> Spread:
        ordered = sorted(self.values)
        last = len(ordered) - 1
        return Spread(ordered[round(0.1 * last)], ordered[round(0.9 * last)])

    def over(self, others: Samples) -> Samples:
        """The ratio of each round: what drifts from round to round hits both alike and cancels."""
        return Samples(tuple(ours / theirs for ours, theirs in zip(self.values, others.values, strict=True)))

    def row(self, name: str, unit: str, *, reference: float | None = None, beside: str = "", target: Target | None = None) -> Row:
        """The median as a row without a ratio. Raises ValueError for fewer than ``REPEATS_MIN`` repeats."""
        self._require_enough(name)
        return Row(name, self.median, unit, reference, beside, None, target, self.spread)

    def row_beside(self, name: str, unit: str, others: Samples, beside: str, *, target: Target | None = None) -> Row:
        """The median as a row with its ratio to ``others``, which took turns with it."""
        self._require_enough(name)
        ratios = self.over(others)
        return Row(name, self.median, unit, others.median, beside, ratios.median, target, self.spread, ratios.spread)

    def _require_enough(self, name: str) -> None:
        if len(self.values) < REPEATS_MIN:
            raise ValueError(f"{name}: {len(self.values)} repeats, at least {REPEATS_MIN} are needed")
