"""What an idle cluster costs, and how long ``moonpool serve`` takes to answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Final

import psutil

from benchmarks.figures import Row, Samples, at_most
from benchmarks.harness import Fixture, registry
from benchmarks.line_process import LineProcess
from benchmarks.served import Served, cluster

WINDOWS: Final = 6
WINDOW_S: Final = 10.0
SETTLE_S: Final = 20.0
"""After a start Ray still looks around for a while."""
READY_REPEATS: Final = 5
ACTORS: Final = 5
"""Scheduler, gateway, pool node, one prefill and one decode worker."""
BASELINE_START_S: Final = 120.0


def _idle_ray() -> LineProcess:
    command = [sys.executable, "-m", "benchmarks.idle_ray", str(ACTORS)]
    return LineProcess("Ray with idle actors", command, start_timeout_s=BASELINE_START_S)


idle_ray: Final = Fixture("idle Ray", _idle_ray)


class Family:
    """A process and everything it started. Ray's processes are among them: they are its children's children."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._seconds: dict[int, float] = {}

    def used(self) -> float:
        """Processor seconds since the last call. A process that ended since counts with nothing, one that began with all it
        used."""
        before, self._seconds = self._seconds, {}
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._seconds[process.pid] = times.user + times.system
        return sum(seconds - before.get(pid, 0.0) for pid, seconds in self._seconds.items())

    def actors(self) -> int:
        """How many of them Ray calls an actor: fewer than there are would mean that the family is not whole."""
        found = 0
        for process in self._root.children(recursive=True):
            try:
                found += (
                    bool(process.cmdline()) and process.cmdline()[0].startswith("ray::") and "IDLE" not in process.cmdline()[0]
                )
            except psutil.NoSuchProcess:
                continue
        return found


@registry.benchmark("idle_cpu", needs=[cluster, idle_ray])
def idle(served: Served, baseline: LineProcess) -> Iterator[Row]:
    """All processes of an idle cluster beyond a Ray with as many actors that do nothing, both at the same time."""
    families = Family(served.process.pid), Family(baseline.pid)
    for family in families:
        if family.actors() < ACTORS:
            raise RuntimeError(f"only {family.actors()} of {ACTORS} actors are seen: their processor time would be missed")
    time.sleep(SETTLE_S)
    for family in families:
        family.used()
    ours, rays = [], []
    since = time.monotonic()
    for _ in range(WINDOWS):
        time.sleep(WINDOW_S)
        used = [family.used() for family in families]
        now = time.monotonic()
        ours.append(100 * used[0] / (now - since))
        rays.append(100 * used[1] / (now - since))
        since = now
    beyond = Samples(tuple(a - b for a, b in zip(ours, rays, strict=True)))
    total, reference = Samples(tuple(ours)).median, Samples(tuple(rays)).median
    beside = f"in all {total:.3g}; Ray with {ACTORS} idle actors"
    yield beyond.row("idle_cpu", "% of a core", reference=reference, beside=beside, target=at_most(3))


@registry.benchmark("ready_serve")
def ready() -> Iterator[Row]:
    """Process start to /health 200, with the model converted already."""
    from engine.models.source import resolve_model
    from engine.settings import ModelSettings

    resolve_model(ModelSettings())
    seconds = []
    for _ in range(READY_REPEATS):
        with Served() as served:
            seconds.append(served.seconds_to_ready)
    yield Samples(tuple(seconds)).row("ready_serve", "s", target=at_most(25))
