"""How large the demo's cluster is on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from cluster.config.sources import Setting

GIB: Final = 2**30
CGROUP: Final = Path("/sys/fs/cgroup")


class Workers(NamedTuple):
    prefill: int
    decode: int


def workers_for(cores: int, memory_bytes: int) -> Workers:
    """Two of each where there are cores for them; otherwise one prefill and, memory allowing, two decode workers.

    The last act kills a decode worker: a second one goes on at once, a single one has to be restarted by Ray first.
    """
    if cores >= 8 and memory_bytes >= 12 * GIB:
        return Workers(2, 2)
    return Workers(1, 2 if memory_bytes >= 6 * GIB else 1)


def defaults() -> list[Setting]:
    """The demo's own defaults; whatever a person sets wins over them."""
    workers = workers_for(len(os.sched_getaffinity(0)), available_bytes())
    chosen = {
        "prefill.workers": workers.prefill,
        "decode.workers": workers.decode,
        "prefill.device_cache": "512MiB",
        "decode.device_cache": "512MiB",
        "pool.dram": "1GiB",
        "gateway.port": 0,
        "gateway.replan_wait_s": 90.0,  # a single decode worker has to load the model again
    }
    return [Setting(key, value, "demo") for key, value in chosen.items()]


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Memory that can be had without swapping: the machine's, or the container's where that is less."""
    machine = next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, max(0, int(limit) - used))
