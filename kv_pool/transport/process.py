"""Is that process still the one it was? A pid alone is not an identity: the kernel uses it again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


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


def watch(pid: int, start: int) -> int | None:
    """A file descriptor that becomes readable when the process that started then ends (pidfd_open(2)); None where it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # Only now the pid cannot be used again unnoticed: look whether it is still the one meant.
    if started(pid) != start:
        os.close(fd)
        return None
    return fd


@dataclass(slots=True)
class Watched:
    """The processes of a node's clients. One descriptor each, however many clients a process is."""

    _fds: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, pid: int, start: int) -> bool:
        """False where that process is gone already."""
        if (pid, start) not in self._fds:
            fd = watch(pid, start)
            if fd is None:
                return False
            self._fds[pid, start] = fd
        return True

    def fds(self) -> dict[int, tuple[int, int]]:
        return {fd: who for who, fd in self._fds.items()}

    def keep_only(self, wanted: set[tuple[int, int]]) -> None:
        for who in [who for who in self._fds if who not in wanted]:
            os.close(self._fds.pop(who))
