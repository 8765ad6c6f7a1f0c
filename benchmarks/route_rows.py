"""The scheduler by itself: rows from ``route_speed.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Row, Samples
from benchmarks.harness import registry

ROUNDS: Final = 5
SIZES: Final = (10, 100, 1000)


def _by_name(rounds: list[dict[str, float]]) -> dict[str, Samples]:
    return {name: Samples(tuple(figures[name] for figures in rounds)) for name in rounds[0]}


@registry.benchmark(*(f"route_{size}_{rank}" for size in SIZES for rank in ("p50", "p99")))
def route() -> Iterator[Row]:
    """Choosing a pair of workers for a prompt of 128 blocks, by the number of workers."""
    from benchmarks.route_speed import route_speed

    figures = _by_name([route_speed(SIZES) for _ in range(ROUNDS)])
    for size in SIZES:
        for rank in ("p50", "p99"):
            yield figures[f"route_{size}_{rank}_us"].row(f"route_{size}_{rank}", "µs")
