"""What an idle cluster costs, and how long ``moonpool serve`` takes to answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import psutil

from benchmarks.harness import Row, Samples, at_most, registry
from benchmarks.served import Served, stop_shared

IDLE_S: Final = 30.0
READY_REPEATS: Final = 5
ACTORS: Final = 5
"""Scheduler, gateway, pool node, one prefill and one decode worker."""

BASELINE = """
import sys, time
from cluster.ray_session import start_local_ray, leave_ray
start_local_ray(namespace="baseline", cpus=2, log_level="WARNING")
import ray
@ray.remote
class Nothing:
    def ping(self): return 1
actors = [Nothing.options(num_cpus=0).remote() for _ in range(int(sys.argv[1]))]
ray.get([a.ping.remote() for a in actors])
print("ready", flush=True)
sys.stdin.readline()
leave_ray()
"""


def cpu_seconds(root: int) -> float:
    """Processor time used so far by ``root`` and everything it started."""
    total = 0.0
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def share_of_a_core(root: int) -> float:
    """Percent of one core that ``root``'s processes use while nothing is asked of them, after a while to settle."""
    time.sleep(10.0)
    before, started = cpu_seconds(root), time.monotonic()
    time.sleep(IDLE_S)
    return 100 * (cpu_seconds(root) - before) / (time.monotonic() - started)


@registry.benchmark("idle_cpu")
def idle() -> Iterator[Row]:
    """All processes of an idle cluster, beyond a Ray with as many actors that do nothing."""
    stop_shared()
    served = Served()
    try:
        ours = share_of_a_core(served.process.pid)
    finally:
        served.stop()
    baseline = subprocess.Popen(
        [sys.executable, "-c", BASELINE, str(ACTORS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    assert baseline.stdin is not None
    assert baseline.stdout is not None
    try:
        while (line := baseline.stdout.readline().strip()) != "ready":
            if not line and baseline.poll() is not None:
                raise RuntimeError("the baseline did not start")
        rays = share_of_a_core(baseline.pid)
    finally:
        baseline.stdin.write("\n")
        baseline.stdin.close()
        baseline.wait(60)
        baseline.stdout.close()
    yield Row(
        "idle_cpu",
        ours - rays,
        "% of a core",
        f"in all {ours:.1f} %, Ray with {ACTORS} idle actors {rays:.1f} %",
        target=at_most(3),
    )


@registry.benchmark("ready_serve")
def ready() -> Iterator[Row]:
    """Process start to /health 200, with the model converted already."""
    stop_shared()
    seconds = []
    for _ in range(READY_REPEATS):
        served = Served()
        seconds.append(served.seconds_to_ready)
        served.stop()
    yield Samples(tuple(seconds)).row("ready_serve", "s", target=at_most(25))
