"""Rounds in which everything that is compared takes its turn."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures import Samples

Round = dict[str, float]
"""Figures by name."""


def rounds_of(count: int, measure: Callable[[], Round]) -> dict[str, Samples]:
    """``count`` rounds after one that warms up, by name."""
    measure()
    rounds = [measure() for _ in range(count)]
    return {name: Samples(tuple(figures[name] for figures in rounds)) for name in rounds[0]}


def rank(values: list[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
