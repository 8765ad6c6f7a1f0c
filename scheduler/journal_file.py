"""Writes a journal beside a running scheduler, which never waits for it.

Rows go through a queue, bounded in rows and bytes, to a thread. Where the disk cannot keep up, or the file has its size, the
journal ends there and says so (:meth:`JournalFile.view`): one with a hole in it could not be replayed. What is written is a whole
journal up to there.

An earlier journal is kept beside the new one as ``NAME.old``, since a scheduler that died is started again at once, and what it
wrote is what somebody will want to see.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, Final

from prefill_worker.task import Order
from scheduler.journal import Input, Output, begins_journal, head, row
from scheduler.plan import SchedulerSettings

log = logging.getLogger(__name__)

ROWS_WAITING_MAX: Final = 20_000
BYTES_WAITING_MAX: Final = 256 * 2**20
"""Of rows that are not written yet; a single larger one (a snapshot) may wait alone."""
BYTES_MAX: Final = 4 * 2**30
STOP_TIMEOUT_S: Final = 5.0


class JournalFile:
    """``start`` makes the file, readable by its owner only. Raises OSError, also where something lies there that is no journal.
    All other methods are for any thread; ``note`` waits for nothing but a short lock."""

    def __init__(
        self, path: Path, settings: SchedulerSettings, order: Order, *, bytes_max: int = BYTES_MAX,
        waiting_max: int = ROWS_WAITING_MAX,
    ) -> None:  # fmt: skip
        self._path = path
        self._head = head(settings, order)
        self._bytes_max = bytes_max
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._fresh = threading.Condition(self._lock)
        self._waiting: deque[bytes] = deque()
        self._bytes_waiting = 0
        self._rows = 0
        self._bytes_taken = 0
        self._why_ended = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._file: BinaryIO | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing is taken any more."""
        return bool(self._why_ended)

    def view(self) -> dict[str, Any]:
        """Plain data: rows and bytes taken so far, and why it ended (empty: it has not)."""
        with self._lock:
            return {"rows": self._rows, "bytes": self._bytes_taken, "ended": self._why_ended}

    def start(self) -> None:
        self._keep_earlier()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb")
        self._take(self._head)
        self._thread.start()

    def note(self, now: float, given: Input, answer: Output) -> None:
        """Keep one row. Called under the scheduler's lock, in the order of what it did; never raises."""
        if self._why_ended:
            return
        try:
            data = row(now, given, answer)
        except Exception:
            log.exception("a row of the journal cannot be packed")
            self._end("a row could not be packed")
            return
        self._take(data)

    def stop(self) -> None:
        """What was noted is written, as far as it goes within a few seconds."""
        self._end("stopped")
        with self._lock:
            self._stopping = True
            self._fresh.notify()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _take(self, data: bytes) -> None:
        with self._lock:
            if self._why_ended:
                return
            if self._bytes_taken + len(data) > self._bytes_max:
                why = "it has its full size"
            elif len(self._waiting) >= self._waiting_max or (
                self._waiting and self._bytes_waiting + len(data) > BYTES_WAITING_MAX
            ):
                why = "the disk cannot keep up"
            else:
                self._waiting.append(data)
                self._bytes_waiting += len(data)
                self._bytes_taken += len(data)
                self._rows += 1
                self._fresh.notify()
                return
        self._end(why)

    def _end(self, why: str) -> None:
        with self._lock:
            if self._why_ended:
                return
            self._why_ended = why
        if why != "stopped":
            log.warning("the journal ends here: %s", why)

    def _keep_earlier(self) -> None:
        """Make room for a new file. Raises OSError where what lies there is no journal: it was not meant to be overwritten."""
        try:
            found = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode) or not begins_journal(os.read(found, 64)):
                raise FileExistsError(f"scheduler.journal: {self._path} is there and is no journal")
        finally:
            os.close(found)
        os.replace(self._path, self._path.with_name(f"{self._path.name}.old"))

    # --- the writing thread ---------------------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self._file is not None
        try:
            with self._file:
                while rows := self._next():
                    for data in rows:
                        self._file.write(data)
                    self._file.flush()
        except OSError as error:
            self._end(error.strerror or "the disk failed")
            with self._lock:
                self._waiting.clear()
                self._bytes_waiting = 0

    def _next(self) -> list[bytes]:
        """All that waits; waits itself where that is nothing. Empty: there will be no more."""
        with self._lock:
            while not self._waiting and not self._stopping:
                self._fresh.wait()
            rows = list(self._waiting)
            self._waiting.clear()
            self._bytes_waiting = 0
            return rows
