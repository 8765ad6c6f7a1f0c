"""Writes a journal beside a running scheduler, which never waits for it.

Rows go through a bounded queue to a thread. Where the disk cannot keep up, or the file has its size, the journal ends there and
says so: one with a hole in it could not be replayed."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Final

from prefill_worker.task import Order
from scheduler.journal import Input, Output, head, row
from scheduler.plan import SchedulerSettings

log = logging.getLogger(__name__)

ROWS_WAITING_MAX: Final = 20_000
BYTES_MAX: Final = 4 * 2**30
STOP_TIMEOUT_S: Final = 5.0
FLUSH_S: Final = 0.5


class JournalFile:
    """``start`` makes the file (readable by its owner only; an earlier one is overwritten). Raises OSError."""

    def __init__(self, path: Path, settings: SchedulerSettings, order: Order, *, bytes_max: int = BYTES_MAX) -> None:
        self._path = path
        self._head = head(settings, order)
        self._bytes_max = bytes_max
        self._waiting: queue.Queue[bytes | None] = queue.Queue(ROWS_WAITING_MAX)
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._descriptor = -1
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether nothing is written any more."""
        return self._ended

    def start(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fchmod(self._descriptor, 0o600)
        self._waiting.put_nowait(self._head)
        self._thread.start()

    def note(self, now: float, given: Input, answer: Output) -> None:
        """Keep one row. Called under the scheduler's lock, in the order of what it did."""
        if self._ended:
            return
        try:
            self._waiting.put_nowait(row(now, given, answer))
        except queue.Full:
            self._end("the disk cannot keep up")

    def stop(self) -> None:
        """What was noted is written, as far as it goes within a few seconds."""
        self._ended = True
        if self._thread.ident is None:
            return
        try:
            self._waiting.put(None, timeout=STOP_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(STOP_TIMEOUT_S)

    def _write(self) -> None:
        written = 0
        with os.fdopen(self._descriptor, "wb") as file:
            while True:
                try:
                    data = self._waiting.get(timeout=FLUSH_S)
                except queue.Empty:
                    file.flush()
                    continue
                if data is None:
                    return
                if written > self._bytes_max:
                    continue  # until the end, so that nobody waits for room
                try:
                    file.write(data)
                except OSError as error:
                    self._end(error.strerror or "the disk failed")
                    written = self._bytes_max
                written += len(data)
                if written > self._bytes_max:
                    self._end("it has its full size")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            log.warning("the journal ends here: %s", why)
