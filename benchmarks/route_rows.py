"""The scheduler by itself: rows from ``route_speed.py``, each cluster in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Row, at_most
from benchmarks.harness import registry
from benchmarks.line_process import LineProcess
from benchmarks.pool_pieces import ROUNDS
from benchmarks.rounds import rounds_of

BLOCKS: Final = 5_000_000
WORKERS: Final = (10, 100, 1000)
LENGTHS: Final = (32, 128, 256)
START_S: Final = 600.0
ANSWER_S: Final = 120.0


@registry.benchmark(
    *(f"route_{workers}w_{length}b_{rank}" for workers in WORKERS for length in LENGTHS for rank in ("p50", "p99"))
)
def route() -> Iterator[Row]:
    """Choosing a pair of workers, by the number of workers and of blocks of the prompt; five million blocks in the index."""
    for workers in WORKERS:
        command = [sys.executable, "-m", "benchmarks.route_child", str(workers), str(BLOCKS)]
        with LineProcess(f"a scheduler of {workers} workers", command, start_timeout_s=START_S) as child:
            for length in LENGTHS:
                figures = rounds_of(ROUNDS, lambda length=length, child=child: child.ask(ANSWER_S, do="route", blocks=length))
                for rank in ("p50", "p99"):
                    target = at_most(1000.0) if (workers, length, rank) == (1000, 256, "p99") else None
                    yield figures[rank].row(f"route_{workers}w_{length}b_{rank}", "µs", target=target)
