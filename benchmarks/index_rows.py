"""Indexes at a million blocks: how long a prefix takes to find in the cluster's, and what a block takes of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.figures import Row, Target, at_most
from benchmarks.harness import registry
from benchmarks.line_process import LineProcess
from benchmarks.pool_pieces import ROUNDS
from benchmarks.rounds import rank, rounds_of

BLOCKS: Final = 1_000_000
CHAIN: Final = 128
LOOK_UPS: Final = 2000
START_S: Final = 300.0
ANSWER_S: Final = 120.0
MEMORY: Final[dict[str, Target | None]] = {"scheduler": at_most(200.0), "ssd": at_most(200.0), "node": None}
"""A node's table of blocks in DRAM is no target: a million of them would be a terabyte."""


def _child(kind: str) -> LineProcess:
    command = [sys.executable, "-m", "benchmarks.index_child", kind, str(BLOCKS)]
    return LineProcess(f"the {kind} index", command, start_timeout_s=START_S)


@registry.benchmark("index_prefix_128_p50", "index_prefix_128_p99")
def prefix() -> Iterator[Row]:
    """In process, of chains that lie all over the index."""
    with _child("scheduler") as child:

        def once() -> dict[str, float]:
            taken = child.ask(ANSWER_S, do="prefix", chain=CHAIN, times=LOOK_UPS)["microseconds"]
            return {"p50": rank(taken, 0.5), "p99": rank(taken, 0.99)}

        figures = rounds_of(ROUNDS, once)
    yield figures["p50"].row("index_prefix_128_p50", "µs", target=at_most(30.0))
    yield figures["p99"].row("index_prefix_128_p99", "µs")


def memory(kind: str) -> Callable[[], Iterator[Row]]:
    """Resident memory of a fresh process, index and keys. Not noise but arithmetic: one measurement is enough."""

    def measure() -> Iterator[Row]:
        with _child(kind) as child:
            yield Row(f"index_{kind}_bytes_per_block", child.started["bytes_per_block"], "B", target=MEMORY[kind])

    return measure


for _kind in MEMORY:
    registry.benchmark(f"index_{_kind}_bytes_per_block")(memory(_kind))
