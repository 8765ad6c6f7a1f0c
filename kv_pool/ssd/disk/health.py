"""Is the disk fit for use, and when is it tried again. Pure.

::

    opening ──▶ up ──failed──▶ draining ──all threads back, files closed──▶ down ──wait is over──▶ opening
       └────────failed────────────▲

*Draining*: a thread may still hang in the kernel, with a slot or a segment in its hands. Until the last one is back nothing is
opened again: what it writes late would otherwise meet what the new opening reads and writes.
"""

from __future__ import annotations

import errno
import os
from enum import StrEnum
from typing import Final

RETRY_MAX_S: Final = 60.0
READ_FAULTS_MAX: Final = 3
"""Reads that fail one after the other before the whole disk counts as broken: one bad sector is no reason."""

HUNG: Final = "hung"
GONE: Final = "gone"
IN_USE: Final = "in use by another process"
NO_SPACE: Final = "no space"

_REASONS = {
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.EIO: "input/output error",
    errno.EROFS: "read-only",
    errno.ENOENT: GONE,
    errno.ENOTDIR: GONE,
    errno.ENODEV: GONE,
    errno.ENXIO: GONE,
    errno.ESTALE: GONE,
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


def reason_of(error: OSError) -> str:
    """What a person is told. No paths."""
    return _REASONS.get(error.errno or 0) or os.strerror(error.errno or errno.EIO).lower()


class Phase(StrEnum):
    NEW = "new"
    OPENING = "opening"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    STOPPED = "stopped"


class Health:
    """``now`` is monotonic seconds throughout."""

    def __init__(self, *, hang_s: float, retry_s: float) -> None:
        if hang_s <= 0 or retry_s <= 0:
            raise ValueError(f"hang_s and retry_s must be positive, got {hang_s} and {retry_s}")
        self.hang_s = hang_s
        self._retry_s = retry_s
        self.phase = Phase.NEW
        self.reason: str | None = None
        """Why it is not up; None where it is, or was never tried."""
        self.failures = 0
        """Since it was last up for as long as the longest wait."""
        self.downs = 0
        self._read_faults = 0
        self._up_since = 0.0
        self._failed_at = 0.0

    @property
    def up(self) -> bool:
        return self.phase is Phase.UP

    def opening(self) -> None:
        self._leave(Phase.NEW, Phase.DOWN)
        self.phase = Phase.OPENING

    def opened(self, now: float) -> None:
        self._leave(Phase.OPENING)
        self.phase = Phase.UP
        self.reason = None
        self._read_faults = 0
        self._up_since = now

    def failed(self, reason: str, now: float) -> bool:
        """Stop using it. True where that is news: it was up, or this was the first attempt."""
        news = self.reason is None
        if self.phase is Phase.UP and now - self._up_since >= RETRY_MAX_S:
            self.failures = 0
        self._leave(Phase.OPENING, Phase.UP)
        self.phase = Phase.DRAINING
        self.reason = reason
        self.failures += 1
        self.downs += news
        self._failed_at = now
        return news

    def drained(self) -> None:
        self._leave(Phase.DRAINING)
        self.phase = Phase.DOWN

    def due(self, now: float) -> bool:
        """Time to try again. The wait doubles with each failure, up to ``RETRY_MAX_S``."""
        return self.phase is Phase.DOWN and now - self._failed_at >= self.wait_s()

    def wait_s(self) -> float:
        return min(RETRY_MAX_S, self._retry_s * 2.0 ** min(max(self.failures - 1, 0), 16))

    def hangs(self, oldest_since: float | None, now: float) -> bool:
        """The oldest job in the kernel has shown no progress for longer than ``hang_s``."""
        return oldest_since is not None and now - oldest_since > self.hang_s

    def read_failed(self) -> bool:
        """True where that was one too many."""
        self._read_faults += 1
        return self._read_faults >= READ_FAULTS_MAX

    def read_worked(self) -> None:
        self._read_faults = 0

    def stopped(self) -> None:
        self.phase = Phase.STOPPED

    def _leave(self, *allowed: Phase) -> None:
        if self.phase not in allowed:
            raise RuntimeError(f"the disk is {self.phase}, not {' or '.join(allowed)}")
