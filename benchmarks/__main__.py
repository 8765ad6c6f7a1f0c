"""``python -m benchmarks [--only REGEX] [--json FILE]`` (``make bench ONLY= JSON=``)."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

# Importing them fills the registry; they run in this order. Those that start a cluster stand together.
# isort: off
from benchmarks import cluster_latency, prediction_rows, idle_and_ready, engine_rates, vllm_rates  # noqa: F401
from benchmarks import route_rows, sim_rows, index_rows, pool_rows, remote_rows, ssd_rows  # noqa: F401

# isort: on
from benchmarks.harness import registry
from benchmarks.report import main

WIDTH_MIN = 160


def _end(number: int, _: FrameType | None) -> None:
    """So that a run that is told to end closes its cluster and its peers."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure moonpool, beside its peers, in one run.")
    parser.add_argument("--only", help="regular expression searched in row names")
    parser.add_argument("--json", type=Path, help="write one JSON object per row to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    console = Console()
    sys.exit(main(registry, options.only, options.json, console if console.is_terminal else Console(width=WIDTH_MIN)))
