"""``python -m benchmarks [--only REGEX] [--json FILE]`` (``make bench ONLY= JSON=``)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import cluster_latency, engine_rates, idle_and_ready, vllm_rates  # noqa: F401 - importing them fills the registry
from benchmarks.harness import main, registry

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure moonpool, beside its peers, in one run.")
    parser.add_argument("--only", help="regular expression searched in row names")
    parser.add_argument("--json", type=Path, help="write one JSON object per row to this file")
    options = parser.parse_args()
    sys.exit(main(registry, options.only, options.json, Console()))
