"""Is that process still the one it was? A pid alone is not an identity: the kernel uses it again."""

from __future__ import annotations

import os


def started(pid: int) -> int:
    """Kernel clock ticks at which ``pid`` started (field 22 of /proc/<pid>/stat, proc(5)); 0 where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def own() -> tuple[int, int]:
    """(pid, start ticks) of this process."""
    return os.getpid(), started(os.getpid())


def alive(pid: int, start: int) -> bool:
    """True while the process that started then runs; a zombie writes nothing any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
        return int(fields[19]) == start and fields[0] not in (b"Z", b"X")
    except (OSError, IndexError, ValueError):
        return False
