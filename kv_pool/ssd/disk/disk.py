"""The SSD tier's disk as its owner sees it: orders in, events out, and nothing that ever waits.

::

    owner's thread          write, read, save_budget, tick ──▶ Workers ──▶ kernel
                            take ◀── outcomes (deque) ◀────────┘  + wake()

All decisions are made on the owner's thread: the threads of ``store.py`` only put outcomes into a deque.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kv_pool.ssd.disk.filesystem import FileSystem
from kv_pool.ssd.disk.health import HUNG, NO_SPACE, Health, Phase
from kv_pool.ssd.disk.store import (
    CORRUPT_FAULT,
    IO_FAULT,
    BudgetSaved,
    Checked,
    Closed,
    Failed,
    Opened,
    Outcome,
    Plan,
    Store,
    WasRead,
    Wrote,
)
from kv_pool.ssd.disk.threads import Workers
from kv_pool.ssd.disk.transfer import Slot
from kv_pool.ssd.records import (
    PAGE,
    BatchWritten,
    DiskDown,
    DiskEvent,
    ReadRecord,
    RecordRead,
    WriteBatch,
)

log = logging.getLogger(__name__)

CHECK_PERIOD_S: Final = 1.0
"""How often it is looked whether the directory is still there."""
SEGMENT_PAGES_MIN: Final = 4
TOLERANT_AFTER: Final = 3
"""Openings that fail before segments which cannot be read are given up."""


class SsdDisk:
    """One directory of ``segments`` files of ``segment_bytes`` each, and ``threads`` threads that read and write it.

    ``slot(index)`` gives a slot's memory: page-aligned, whole pages, writable. ``wake()`` is called from the threads whenever
    :meth:`take` has something new. ``hang_s``: a single call to the kernel that takes longer means that the disk hangs;
    ``retry_s``: the first wait before a broken disk is tried again. ``jobs_max``: reads and batches that may be under way.

    All methods but ``stats`` and ``healthy`` are for one thread, the owner's. Every batch and read gets one answer through
    :meth:`take`, and by then no thread touches its slots. Batches are acknowledged in the order in which they came.
    Raises ValueError where the sizes cannot be.
    """

    def __init__(
        self,
        *,
        directory: str,
        segments: int,
        segment_bytes: int,
        slot: Slot,
        wake: Callable[[], None],
        threads: int = 4,
        hang_s: float = 10.0,
        retry_s: float = 1.0,
        jobs_max: int = 256,
        filesystem: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if segments < 1 or segment_bytes % PAGE or segment_bytes < SEGMENT_PAGES_MIN * PAGE:
            raise ValueError(
                f"an SSD tier has segments of whole pages ({PAGE} bytes), at least {SEGMENT_PAGES_MIN} of them; "
                f"got {segments} segments of {segment_bytes} bytes"
            )
        if threads < 1 or jobs_max < 1:
            raise ValueError(f"threads and jobs_max must be at least 1, got {threads} and {jobs_max}")
        self._path = directory
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._slot = slot
        self._wake = wake
        self._threads = threads
        self._jobs_max = jobs_max
        self._filesystem = filesystem or FileSystem()
        self._clock = clock
        self._health = Health(hang_s=hang_s, retry_s=retry_s)
        self._store: Store | None = None
        self._outcomes: deque[tuple[Store, Outcome]] = deque()
        self._events: deque[DiskEvent] = deque()
        self._reads: set[int] = set()
        self._writes: dict[int, BatchWritten | None] = {}
        """In the order in which they came; an answer waits for those before it."""
        self._budget_next: bytes | None = None
        self._budget_saving = False
        self._checking = False
        self._next_check = 0.0
        self._device: int | None = None
        self._needed: int | None = None
        self._said_buffered = False
        self._counts = {
            "ssd_reads": 0,
            "ssd_batches": 0,
            "ssd_bytes_read": 0,
            "ssd_bytes_written": 0,
            "ssd_corrupt": 0,
            "ssd_read_errors": 0,
            "ssd_refused": 0,
            "ssd_recovered_records": 0,
        }

    # --- the owner's door ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to open the directory; :class:`DiskUp` or :class:`DiskDown` follows.

        Waits until it is known whether the directory is ours (``hang_s`` at most). Raises SsdFormatError where it is not.
        """
        self._open()
        assert self._store is not None
        self._store.directory_tried.wait(self._health.hang_s)
        if self._store.refusal is not None:
            refusal = self._store.refusal
            self.stop(self._health.hang_s)
            raise refusal

    def stop(self, timeout_s: float) -> bool:
        """Finish what was asked, close, and have all answers ready for :meth:`take`. False where that took longer than
        ``timeout_s``: a thread that still hangs in the kernel keeps its slot, its file and the lock until it is back."""
        store, health = self._store, self._health
        if store is not None and health.up and self._budget_next is not None:
            store.save_budget(self._budget_next)
        health.stopped()
        if store is None:
            return True
        store.end()
        ended = store.workers.join(timeout_s)
        if not ended:
            log.error("ssd: a thread did not come back from the disk in %g s", timeout_s)
            self._answer_dropped(store.abandon())
        self._settle_all()
        return ended

    def write(self, batch: WriteBatch) -> None:
        """Its slots are not to be changed until the answer, :class:`BatchWritten`. A batch that comes while ``jobs_max`` are
        under way, or while the disk is down, is answered "no"."""
        if self._has_room() and self._store is not None and self._store.write(batch):
            self._writes[batch.id] = None
            return
        self._counts["ssd_refused"] += 1
        self._events.append(BatchWritten(batch.id, False, 0))
        self._wake()

    def read(self, job: ReadRecord) -> None:
        """Its slot is not to be touched until the answer, :class:`RecordRead`. One that comes while the disk is down, or too many
        are under way, is answered with "io"."""
        if self._has_room() and self._store is not None and self._store.read(job):
            self._reads.add(job.id)
            return
        self._counts["ssd_refused"] += 1
        self._events.append(RecordRead(job.id, None, IO_FAULT))
        self._wake()

    @property
    def room(self) -> int:
        """Reads and batches that would be taken now."""
        return max(0, self._jobs_max - len(self._reads) - len(self._writes)) if self._health.up else 0

    def save_budget(self, packed: bytes) -> None:
        """Have the write budget outlive a restart. The latest one counts; one that comes while the disk is down is forgotten."""
        if not self._health.up or self._store is None:
            return
        if self._budget_saving:
            self._budget_next = packed
        else:
            self._budget_saving = self._store.save_budget(packed)

    def take(self) -> list[DiskEvent]:
        """Everything new, in order."""
        self._settle_all()
        events = list(self._events)
        self._events.clear()
        return events

    def tick(self, now: float) -> None:
        """Notice a disk that hangs or is gone, try a broken one again. ``now``: ``time.monotonic()``. To be called a few times a
        second."""
        self._settle_all()
        store, health = self._store, self._health
        if health.due(now):
            self._open()
        if store is None:
            return
        if health.phase in (Phase.OPENING, Phase.UP) and health.hangs(store.workers.oldest_since(), now):
            self._fail(HUNG)
        if health.up and not self._checking and now >= self._next_check:
            self._next_check = now + CHECK_PERIOD_S
            self._checking = store.check()
        if self._events:
            self._wake()

    @property
    def healthy(self) -> bool:
        return self._health.up

    def stats(self) -> dict[str, int | float | str]:
        """Counters and gauges, from any thread."""
        store = self._store
        return self._counts | {
            "ssd_phase": self._health.phase.value,
            "ssd_reason": self._health.reason or "",
            "ssd_downs": self._health.downs,
            "ssd_reading": len(self._reads),
            "ssd_writing": len(self._writes),
            "ssd_threads_busy": store.workers.busy if store is not None else 0,
        }

    # --- what came back -----------------------------------------------------------------------------------------------------

    def _put(self, store: Store, outcome: Outcome) -> None:
        """On the threads; after :meth:`stop` nobody is woken any more, for the owner may be gone."""
        self._outcomes.append((store, outcome))
        if self._health.phase is not Phase.STOPPED:
            self._wake()

    def _settle_all(self) -> None:
        while self._outcomes:
            _, outcome = self._outcomes.popleft()
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        """There is one store at a time, so every outcome is of the present one."""
        match outcome:
            case Wrote():
                self._settle_write(outcome)
            case WasRead():
                self._settle_read(outcome)
            case Opened():
                self._settle_opened(outcome)
            case Failed(reason):
                self._checking = False
                self._fail(reason)
            case Checked():
                self._checking = False
            case BudgetSaved(reason):
                self._budget_saving = False
                if reason is not None:
                    self._fail(reason)
                elif self._budget_next is not None:
                    packed, self._budget_next = self._budget_next, None
                    self.save_budget(packed)
            case Closed():
                self._settle_closed()

    def _settle_opened(self, opened: Opened) -> None:
        if self._health.phase is not Phase.OPENING:
            return  # it hung meanwhile
        self._health.opened(self._clock())
        self._device, self._needed = opened.device, None
        if not opened.direct and not self._said_buffered:
            self._said_buffered = True
            log.warning("ssd: the filesystem refuses O_DIRECT, so the tier goes through the page cache")
        records = sum(len(segment.entries) for segment in opened.up.segments)
        self._counts["ssd_recovered_records"] += records
        log.info("ssd: up, %d records in %d segments", records, len(opened.up.segments))
        self._events.append(opened.up)

    def _settle_write(self, wrote: Wrote) -> None:
        self._counts["ssd_batches"] += wrote.ok
        self._counts["ssd_bytes_written"] += wrote.bytes_written
        if wrote.reason is not None:
            if wrote.reason == NO_SPACE:
                self._needed = wrote.segment
            self._fail(wrote.reason)
        lost = self._health.phase is Phase.DRAINING  # it may be on the medium; the next opening will tell
        self._writes[wrote.batch] = BatchWritten(wrote.batch, wrote.ok and not lost, wrote.bytes_written)
        self._answer_writes()

    def _answer_writes(self) -> None:
        """In their order while all is well; as they come where it is not."""
        ready: list[BatchWritten] = []
        for answer in self._writes.values():
            if answer is not None:
                ready.append(answer)
            elif self._health.up:
                break
        for answer in ready:
            del self._writes[answer.id]
        self._events.extend(ready)

    def _settle_read(self, read: WasRead) -> None:
        self._reads.discard(read.job)
        self._counts["ssd_reads"] += 1
        if read.record is not None:
            self._counts["ssd_bytes_read"] += read.record.length
            self._health.read_worked()
        elif read.fault == CORRUPT_FAULT:
            self._counts["ssd_corrupt"] += 1
        else:
            self._counts["ssd_read_errors"] += 1
        if read.reason is not None and (not read.passing or self._health.read_failed()):
            self._fail(read.reason)
        self._events.append(RecordRead(read.job, read.record, read.fault))

    def _settle_closed(self) -> None:
        assert not self._reads, "a read was lost"
        assert not self._writes, "a batch was lost"
        self._store = None
        if self._health.phase is Phase.DRAINING:
            self._health.drained()

    # --- up and down --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        health = self._health
        health.opening()
        plan = Plan(
            directory=self._path,
            segments=self._segments,
            segment_bytes=self._segment_bytes,
            device=self._device,
            needed=self._needed,
            tolerant=health.failures >= TOLERANT_AFTER,
        )
        workers = Workers(self._threads, name="ssd", clock=self._clock)
        self._store = Store(plan, workers=workers, filesystem=self._filesystem, slot=self._slot, done=self._put)
        self._store.open()

    def _fail(self, reason: str) -> None:
        """Stop using the disk, and begin to let go of it. What waits is answered now, what runs when its thread is back."""
        health = self._health
        if health.phase not in (Phase.OPENING, Phase.UP):
            return
        if health.failed(reason, self._clock()):
            log.warning("ssd: down (%s); the node goes on without it", reason)
            self._events.append(DiskDown(reason))
        self._budget_next, self._budget_saving, self._checking = None, False, False
        assert self._store is not None
        self._answer_dropped(self._store.abandon())

    def _answer_dropped(self, dropped: list[ReadRecord | WriteBatch | Wrote]) -> None:
        """No to those that never started, and to those whose answer was only waiting for others before it."""
        for order in dropped:
            match order:
                case ReadRecord():
                    self._reads.discard(order.id)
                    self._events.append(RecordRead(order.id, None, IO_FAULT))
                case WriteBatch():
                    self._writes[order.id] = BatchWritten(order.id, False, 0)
                case Wrote():
                    self._counts["ssd_bytes_written"] += order.bytes_written
                    self._writes[order.batch] = BatchWritten(order.batch, False, order.bytes_written)
        for number, answer in self._writes.items():
            if answer is not None:
                self._writes[number] = BatchWritten(number, False, answer.bytes_written)
        self._answer_writes()

    def _has_room(self) -> bool:
        return self.room > 0
