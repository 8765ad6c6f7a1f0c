"""The cluster's block index at a million blocks: how long a prefix takes to find, and what a block takes of memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Row, at_most
from benchmarks.harness import registry
from benchmarks.line_process import LineProcess
from benchmarks.pool_pieces import ROUNDS
from benchmarks.rounds import rank, rounds_of

ENTRIES: Final = 1_000_000
NODES: Final = 8
CHAIN: Final = 128
LOOK_UPS: Final = 2000
START_S: Final = 180.0
ANSWER_S: Final = 120.0


def _child(entries: int) -> LineProcess:
    command = [sys.executable, "-m", "benchmarks.index_child", str(entries), str(NODES)]
    return LineProcess("the index", command, start_timeout_s=START_S)


@registry.benchmark("index_prefix_128_p50", "index_prefix_128_p99")
def prefix() -> Iterator[Row]:
    """In process, of chains that lie all over the index."""
    with _child(ENTRIES) as child:

        def once() -> dict[str, float]:
            taken = child.ask(ANSWER_S, do="prefix", chain=CHAIN, times=LOOK_UPS)["microseconds"]
            return {"p50": rank(taken, 0.5), "p99": rank(taken, 0.99)}

        figures = rounds_of(ROUNDS, once)
    yield figures["p50"].row("index_prefix_128_p50", "µs", target=at_most(30.0))
    yield figures["p99"].row("index_prefix_128_p99", "µs")


@registry.benchmark("index_bytes_per_block")
def memory() -> Iterator[Row]:
    """Resident memory of a fresh process, index and keys."""

    def once() -> dict[str, float]:
        with _child(ENTRIES) as child:
            return {"bytes": child.started["bytes_per_block"]}

    yield rounds_of(ROUNDS, once)["bytes"].row("index_bytes_per_block", "B", target=at_most(200.0))
