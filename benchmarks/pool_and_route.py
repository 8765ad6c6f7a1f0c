"""The pool node and the scheduler by themselves: rows from ``pool_speed.py`` and ``route_speed.py``. No targets yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Row, Samples
from benchmarks.harness import registry

ROUNDS: Final = 5
SIZES: Final = (10, 100, 1000)
CHAIN: Final = 32
ROUND_TRIPS: Final = 400


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


@registry.benchmark("pool_put", "pool_get")
def local() -> Iterator[Row]:
    """A worker storing and loading blocks at its own node, beside a plain memcpy plus checksum of the same pieces."""
    from benchmarks.pool_speed import local_copy

    figures = _by_name([local_copy(repeats=1) for _ in range(ROUNDS)])
    best, beside = figures["memcpy_and_checksum_gb_s"], "memcpy and checksum"
    for name in ("put", "get"):
        yield figures[f"{name}_gb_s"].row_beside(f"pool_{name}", "GB/s", best, beside)


@registry.benchmark("pool_acquire_1_p50", f"pool_acquire_{CHAIN}_p50")
def control() -> Iterator[Row]:
    """An acquire and its release without the copy: one block, and a chain."""
    from benchmarks.pool_speed import control_round_trip

    figures = _by_name([control_round_trip(repeats=ROUND_TRIPS, chain=CHAIN) for _ in range(ROUNDS)])
    for count in (1, CHAIN):
        yield figures[f"acquire_{count}_us_p50"].row(f"pool_acquire_{count}_p50", "µs")


@registry.benchmark("pool_remote")
def remote() -> Iterator[Row]:
    """Blocks pulled from another node over loopback, checked on arrival."""
    from benchmarks.pool_speed import remote_pull

    figures = _by_name([remote_pull(repeats=1) for _ in range(ROUNDS)])
    yield figures["remote_gb_s"].row("pool_remote", "GB/s")
