"""A scheduler alone in a process: ``python -m benchmarks.route_child WORKERS BLOCKS`` builds its index and answers ``{"do":
"route", "blocks": n}`` with microseconds, one JSON object a line."""

from __future__ import annotations

import json
import sys

from benchmarks.route_speed import cluster, decisions

NOW = 1000.0


def main() -> None:
    workers, blocks = int(sys.argv[1]), int(sys.argv[2])
    state = cluster(workers, blocks, NOW)
    print(json.dumps({"entries": state.index.entries}), flush=True)
    for line in sys.stdin:
        p50, p99 = decisions(state, json.loads(line)["blocks"], NOW)
        print(json.dumps({"p50": p50, "p99": p99}), flush=True)


if __name__ == "__main__":
    main()
