"""What this machine gives a benchmark."""

from __future__ import annotations

import os


def threads() -> int:
    """Compute threads where one process has the machine to itself: the cores this process may run on."""
    return len(os.sched_getaffinity(0))


def worker_threads() -> int:
    """Compute threads of a worker in the default cluster, one prefill and one decode worker sharing the cores out."""
    return max(1, (os.cpu_count() or 1) // 2)
