"""Asks nodes for snapshots beside the scheduler's I/O thread, which a slow node must not hold up."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final

from scheduler.index import NodeSnapshot
from scheduler.messages import FetchSnapshot, SnapshotArrived, SnapshotFailed

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S: Final = 10.0
ORDERS_WAITING_MAX: Final = 256

SnapshotFetcher = Callable[[str, float], NodeSnapshot]
"""``fetch(endpoint, timeout_s)``; raises whatever it likes where the node does not answer."""


class WakeUp:
    """Lets other threads end the I/O thread's wait. ``ring`` may come at any time, also after ``close``."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._read.fileno()

    def ring(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full, which wakes as well, or closed
            self._write.send(b"x")

    def clear(self) -> None:
        self._read.recv(4096)

    def close(self) -> None:
        with self._lock:
            self._read.close()
            self._write.close()


class SnapshotThread:
    """Asks nodes for snapshots, one after the other. ``wake`` is called when there is a result."""

    def __init__(self, fetch: SnapshotFetcher, wake: Callable[[], None]) -> None:
        self._fetch = fetch
        self._wake = wake
        self._orders: queue.Queue[FetchSnapshot | None] = queue.Queue(ORDERS_WAITING_MAX)
        self._results: queue.Queue[SnapshotArrived | SnapshotFailed] = queue.Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a fetch under way: the thread is a daemon and ends after it."""
        self._stopping.set()
        self.ask(None)

    def ask(self, order: FetchSnapshot | None) -> bool:
        """False where too many wait already."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def results(self) -> list[SnapshotArrived | SnapshotFailed]:
        """What came since the last call; at most one per order."""
        found: list[SnapshotArrived | SnapshotFailed] = []
        while True:
            try:
                found.append(self._results.get_nowait())
            except queue.Empty:
                return found

    def _run(self) -> None:
        while not self._stopping.is_set():
            order = self._orders.get()
            if order is None:
                continue
            try:
                self._results.put(SnapshotArrived(self._fetch(order.endpoint, SNAPSHOT_TIMEOUT_S)))
            except Exception as error:
                log.warning("snapshot of %s: %s", order.node_id, error)
                self._results.put(SnapshotFailed(order.node_id, order.incarnation))
            self._wake()
