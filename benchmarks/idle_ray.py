"""A Ray started as the cluster starts its own, with actors that do nothing (``python -m benchmarks.idle_ray COUNT``)."""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.peers.lines import answers_to_own_stdout, serve
from cluster.ray_session import leave_ray, start_local_ray


class Nothing:
    def ping(self) -> int:
        return 1


def main() -> None:
    answer = answers_to_own_stdout()
    count = int(sys.argv[1])
    start_local_ray(namespace="baseline", cpus=max(os.cpu_count() or 1, 2), log_level="WARNING")
    import ray

    try:
        actors: list[Any] = [ray.remote(Nothing).options(num_cpus=0).remote() for _ in range(count)]
        ray.get([actor.ping.remote() for actor in actors], timeout=60)
        serve(answer, lambda _: {})
    finally:
        leave_ray()


if __name__ == "__main__":
    main()
