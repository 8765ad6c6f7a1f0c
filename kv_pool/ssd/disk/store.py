"""One opening of the directory: everything that happens on its threads, from the lock to the close.

Each job ends with one *outcome* that is handed to ``done`` on the thread it ran on. No method here waits for the disk.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from kv_pool.ssd.disk.budget_file import load_budget, save_budget
from kv_pool.ssd.disk.directory import Directory, DirectoryInUseError, ForeignDeviceError
from kv_pool.ssd.disk.files import ScratchPool, SegmentFiles, ShortTransferError, direct_works
from kv_pool.ssd.disk.filesystem import FileSystem
from kv_pool.ssd.disk.health import GONE, IN_USE, reason_of
from kv_pool.ssd.disk.recovery import recover_segment
from kv_pool.ssd.disk.threads import Job, Workers
from kv_pool.ssd.disk.transfer import Slot, Transfers
from kv_pool.ssd.records import DiskUp, Fault, ReadRecord, Record, RecoveredSegment, SsdFormatError, WriteBatch

log = logging.getLogger(__name__)

BUDGET_GROUP = -1
"""Order of writes: no segment has this number."""
IO_FAULT: Fault = "io"
CORRUPT_FAULT: Fault = "corrupt"
OTHER_FORMAT = "not a directory of this format"
BUG = "internal error"


@dataclass(frozen=True, slots=True)
class Opened:
    up: DiskUp
    device: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The opening or a check of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wrote:
    batch: int
    segment: int
    ok: bool
    bytes_written: int
    reason: str | None
    """Why the disk is to blame."""


@dataclass(frozen=True, slots=True)
class WasRead:
    job: int
    record: Record | None
    fault: Fault | None
    reason: str | None
    passing: bool
    """The disk may be sound all the same: one place could not be read."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The directory is still the one that was opened."""


@dataclass(frozen=True, slots=True)
class BudgetSaved:
    reason: str | None


@dataclass(frozen=True, slots=True)
class Closed:
    """The last outcome: no thread touches anything any more."""


Outcome = Opened | Failed | Wrote | WasRead | Checked | BudgetSaved | Closed


@dataclass(frozen=True, slots=True)
class Plan:
    """What to open, and how. ``device``: where it was before. ``needed``: the segment that lacked room before.
    ``tolerant``: segments that cannot be read are given up, for others might be."""

    directory: str
    segments: int
    segment_bytes: int
    device: int | None
    needed: int | None
    tolerant: bool


class Store:
    """``done(store, outcome)`` is called from the threads."""

    def __init__(
        self,
        plan: Plan,
        *,
        workers: Workers,
        filesystem: FileSystem,
        slot: Slot,
        done: Callable[[Store, Outcome], None],
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._filesystem = filesystem
        self._slot = slot
        self._done = done
        self._scratch = ScratchPool()
        self._directory: Directory | None = None
        self._files: SegmentFiles | None = None
        self._transfers: Transfers | None = None
        self._direct = True
        self._recovering = threading.Lock()
        self._left = 0
        self._found: list[RecoveredSegment] = []
        self._unreadable: list[int] = []
        self._reason: str | None = None
        self._budget: bytes | None = None
        self.directory_tried = threading.Event()
        """Set when the directory is open, or cannot be."""
        self.refusal: SsdFormatError | None = None
        """Set before that where the directory is of another format."""

    @property
    def workers(self) -> Workers:
        return self._workers

    def open(self) -> None:
        self._workers.start()
        self._workers.submit(Job(self._open))

    def read(self, job: ReadRecord) -> bool:
        """False where the end has begun."""
        return self._workers.submit(Job(lambda: self._read(job), order=job))

    def write(self, batch: WriteBatch) -> bool:
        """False where the end has begun. A segment's header page is on the medium before what is behind it in the same segment,
        a footer after all that came before. Between these two, batches run side by side."""
        return self._workers.submit(Job(lambda: self._write(batch), group=batch.segment, alone=batch.opens, order=batch))

    def save_budget(self, packed: bytes) -> bool:
        return self._workers.submit(Job(lambda: self._save_budget(packed), group=BUDGET_GROUP, alone=True))

    def check(self) -> bool:
        return self._workers.submit(Job(self._check))

    def end(self) -> None:
        """Do what was asked, then close. The last outcome is :class:`Closed`."""
        self._workers.end(Job(self._close))

    def abandon(self) -> list[ReadRecord | WriteBatch | Wrote]:
        """Close when the threads are back. What has not started is returned, and has no outcome; of a batch that only lacks its
        footer, that is what came of it."""
        dropped = self._workers.abandon(Job(self._close))
        return [job.order for job in dropped if isinstance(job.order, ReadRecord | WriteBatch | Wrote)]

    # --- on the threads -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            segments = self._open_directory()
        except SsdFormatError as error:
            self.refusal = error
            self._finish(Failed(OTHER_FORMAT))
        except DirectoryInUseError:
            self._finish(Failed(IN_USE))
        except ForeignDeviceError:
            self._finish(Failed(GONE))
        except OSError as error:
            self._finish(Failed(reason_of(error)))
        except Exception:
            log.exception("ssd: the directory was not opened")
            self._finish(Failed(BUG))
        else:
            self._left = len(segments)
            if not segments:
                self._finish_recovery()
            for segment in segments:
                self._workers.submit(Job(lambda segment=segment: self._recover(segment)))
        finally:
            self.directory_tried.set()

    def _open_directory(self) -> list[int]:
        plan = self._plan
        directory = self._directory = Directory.open(
            plan.directory,
            segments=plan.segments,
            segment_bytes=plan.segment_bytes,
            filesystem=self._filesystem,
            device=plan.device,
        )
        with self._scratch.buffer() as buffer:
            self._direct = direct_works(directory, buffer)
        files = self._files = SegmentFiles(directory, direct=self._direct, beat=self._workers.beat)
        self._transfers = Transfers(
            files=files,
            scratch=self._scratch,
            slot=self._slot,
            store=directory.format.store,
            segment_pages=directory.segment_pages,
        )
        if plan.needed is not None:
            with files.using(plan.needed, create=True) as file:
                file.allocate()
        self._budget = load_budget(directory)
        return directory.segments_found()

    def _recover(self, segment: int) -> None:
        assert self._directory is not None
        assert self._files is not None
        found: RecoveredSegment | None = None
        reason: str | None = None
        try:
            found = recover_segment(
                self._files,
                self._scratch,
                store=self._directory.format.store,
                segment=segment,
                segment_pages=self._directory.segment_pages,
            )
        except OSError as error:
            reason = reason_of(error)
        except Exception:
            log.exception("ssd: segment %d was not recovered", segment)
            reason = BUG
        with self._recovering:
            if reason is not None:
                self._reason = reason
                self._unreadable.append(segment)
            elif found is not None:
                self._found.append(found)
            self._left -= 1
            last = not self._left
        if last:
            self._finish_recovery()

    def _finish_recovery(self) -> None:
        assert self._directory is not None
        if self._reason is not None and not (self._plan.tolerant and self._found):
            self._finish(Failed(self._reason))
            return
        # Given up: what they hold is of no generation that will ever be written again.
        generation = 1 + max((found.generation for found in self._found), default=0)
        for segment in self._unreadable:
            log.warning("ssd: segment %d cannot be read, its records are lost", segment)
            self._found.append(RecoveredSegment(segment, generation, 0, True, self._directory.segment_pages, ()))
        try:
            device = self._directory.device
        except OSError as error:
            self._finish(Failed(reason_of(error)))
            return
        segments = tuple(sorted(self._found, key=lambda found: found.id))
        up = DiskUp(segments, self._budget, self._directory.format.store.hex())
        self._finish(Opened(up, device, self._direct))

    def _read(self, job: ReadRecord) -> None:
        assert self._transfers is not None
        try:
            record = self._transfers.read(job)
        except OSError as error:
            passing = isinstance(error, ShortTransferError) or error.errno == errno.EIO
            outcome = WasRead(job.id, None, IO_FAULT, reason_of(error), passing)
        except Exception:
            log.exception("ssd: read %d failed", job.id)
            outcome = WasRead(job.id, None, IO_FAULT, None, True)
        else:
            outcome = WasRead(job.id, record, None if record is not None else CORRUPT_FAULT, None, True)
        self._finish(outcome)

    def _write(self, batch: WriteBatch) -> None:
        transfers = self._transfers
        assert transfers is not None
        tried: list[int] = []
        wrote = self._try_write(batch, tried, lambda: transfers.write(batch, tried.append, self._workers.no_longer_alone))
        footer = batch.footer
        if wrote.ok and footer is not None:

            def seal() -> None:
                self._finish(self._try_write(batch, tried, lambda: transfers.seal(batch, footer, tried.append)))

            # Behind everything that was asked of this segment before: all of it is on the medium by then.
            wrote = replace(wrote, ok=False)  # not before it is sealed
            if self._workers.submit_next(Job(seal, group=batch.segment, alone=True, order=wrote)):
                return
        self._finish(wrote)

    def _try_write(self, batch: WriteBatch, tried: list[int], write: Callable[[], None]) -> Wrote:
        ok, reason = False, None
        try:
            write()
            ok = True
        except OSError as error:
            reason = reason_of(error)
        except Exception:
            log.exception("ssd: batch %d was not written", batch.id)
        return Wrote(batch.id, batch.segment, ok, sum(tried), reason)

    def _save_budget(self, packed: bytes) -> None:
        assert self._directory is not None
        reason = None
        try:
            save_budget(self._directory, packed)
        except OSError as error:
            reason = reason_of(error)
        except Exception:
            log.exception("ssd: the write budget was not saved")
        self._finish(BudgetSaved(reason))

    def _check(self) -> None:
        assert self._directory is not None
        try:
            self._finish(Checked() if self._directory.still_there() else Failed(GONE))
        except OSError as error:
            self._finish(Failed(reason_of(error)))

    def _close(self) -> None:
        try:
            if self._files is not None:
                self._files.close()
            if self._directory is not None:
                self._directory.close()
        except OSError as error:
            log.warning("ssd: closing failed: %s", reason_of(error))
        self._finish(Closed())

    def _finish(self, outcome: Outcome) -> None:
        self._done(self, outcome)
