"""A disk with a few slots of memory, blocks whose bytes derive from their keys, and a filesystem that fails on demand."""

from __future__ import annotations

import errno
import hashlib
import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import xxhash

from kv_pool.keys import BlockKey
from kv_pool.ssd.disk.disk import SsdDisk
from kv_pool.ssd.disk.filesystem import FileSystem
from kv_pool.ssd.records import (
    PAGE,
    BatchWritten,
    DiskEvent,
    DiskUp,
    Footer,
    FooterEntry,
    Place,
    ReadRecord,
    Record,
    RecordRead,
    WriteBatch,
    WriteRecord,
    footer_pages,
    record_pages,
)

Kind = TypeVar("Kind", bound=DiskEvent)
Result = TypeVar("Result")

DEADLINE_S = 20.0
FAR = 4_000_000_000.0
"""Wall-clock seconds: long after any test."""


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(str(number).encode(), digest_size=16).digest())


def payload_of(key: bytes, length: int) -> bytes:
    """The only right bytes of that block."""
    return random.Random(key).randbytes(length)


class Arena:
    """``slots`` page-aligned slots."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self._memory = memoryview(mmap.mmap(-1, slots * self.slot_bytes))

    def slot(self, index: int) -> memoryview:
        return self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]


@dataclass
class Fault:
    """``calls`` fail with ``error`` (an errno, "short", "torn", "hang") from their ``after``-th on, ``times`` times."""

    calls: frozenset[str]
    error: int | str
    after: int = 0
    times: float = float("inf")


class FaultyFileSystem(FileSystem):
    """The real one, with faults in front. ``release`` lets everything go on that hangs."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.faults: list[Fault] = []
        self.hanging = threading.Semaphore(0)
        """One more for each call that hangs."""
        self._released = threading.Event()
        self._lock = threading.Lock()
        self.calls: list[str] = []

    def fail(self, *calls: str, error: int | str, after: int = 0, times: float = float("inf")) -> None:
        self.faults.append(Fault(frozenset(calls), error, after, times))

    def heal(self) -> None:
        with self._lock:
            self.faults.clear()

    def release(self) -> None:
        self.heal()
        self._released.set()

    def _fault(self, call: str) -> int | str | None:
        with self._lock:
            self.calls.append(call)
            for fault in self.faults:
                if call not in fault.calls or fault.times <= 0:
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault.error
        return None

    def _meet(self, call: str) -> str | None:
        error = self._fault(call)
        if isinstance(error, int):
            raise OSError(error, "injected")
        if error == "hang":
            self.hanging.release()
            assert self._released.wait(DEADLINE_S)
            return None
        return error

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self._meet("open")
        return super().open(name, flags, dir_fd)

    def listdir(self, dir_fd: int) -> list[str]:
        self._meet("listdir")
        return super().listdir(dir_fd)

    def replace(self, source: str, target: str, dir_fd: int) -> None:
        self._meet("replace")
        super().replace(source, target, dir_fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._meet("fallocate")
        super().fallocate(fd, offset, length)

    def fdatasync(self, fd: int) -> None:
        self._meet("fdatasync")
        super().fdatasync(fd)

    def stat(self, path: str) -> Any:
        self._meet("stat")
        return super().stat(path)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._meet("preadv") == "short":
            return super().preadv(fd, _prefix(buffers, self._part(buffers)), offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        fault = self._meet("pwritev")
        if fault == "short":
            return super().pwritev(fd, _prefix(buffers, self._part(buffers)), offset)
        if fault == "torn":
            part = _prefix(buffers, self._part(buffers))
            if part:
                super().pwritev(fd, part, offset)
            raise OSError(errno.EIO, "injected")
        return super().pwritev(fd, buffers, offset)

    def _part(self, buffers: Sequence[memoryview | bytes]) -> int:
        return self.random.randrange(0, sum(map(len, buffers)), PAGE)


def _prefix(buffers: Sequence[memoryview | bytes], size: int) -> list[memoryview]:
    kept: list[memoryview] = []
    for buffer in buffers:
        if size <= 0:
            break
        kept.append(memoryview(buffer)[:size])
        size -= len(buffer)
    return kept


@dataclass
class Written:
    """A block that was acknowledged, or that was tried."""

    key: BlockKey
    place: Place
    checksum: int


@dataclass
class Filling:
    """A segment that is being written."""

    segment: int
    generation: int
    page: int = 1
    opened: bool = False
    entries: list[FooterEntry] = field(default_factory=list)


class Scene:
    """One :class:`SsdDisk` and a log without any cleverness."""

    def __init__(
        self,
        directory: str,
        *,
        segments: int = 4,
        segment_bytes: int = 64 * PAGE,
        slots: int = 8,
        slot_bytes: int = 4 * PAGE,
        filesystem: FileSystem | None = None,
        **options: Any,
    ) -> None:
        self.arena = Arena(slots, slot_bytes)
        self.slots = slots
        self.segments = segments
        self.segment_pages = segment_bytes // PAGE
        self.woken = threading.Event()
        self.events: list[DiskEvent] = []
        self.next_id = 0
        settings: dict[str, Any] = {"threads": 2, "hang_s": 5.0, "retry_s": 0.02, "jobs_max": 64} | options
        self.disk = SsdDisk(
            directory=directory,
            segments=segments,
            segment_bytes=segment_bytes,
            slot=self.arena.slot,
            wake=self.woken.set,
            filesystem=filesystem,
            **settings,
        )

    def start(self) -> DiskUp:
        self.disk.start()
        return self.wait_for(DiskUp)

    def stop(self) -> None:
        assert self.disk.stop(DEADLINE_S)

    def wait_for(self, kind: type[Kind], number: int | None = None) -> Kind:
        """The next event of that kind (with that id); those before it stay in ``events``."""
        return self.wait_until(
            lambda: next((e for e in self.events if isinstance(e, kind) and (number is None or e.id == number)), None)  # type: ignore[attr-defined]
        )

    def wait_until(self, found: Callable[[], Result | None]) -> Result:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.woken.clear()
            self.disk.tick(time.monotonic())
            self.events += self.disk.take()
            result = found()
            if result:
                if result in self.events:
                    self.events.remove(result)  # type: ignore[arg-type]
                return result
            assert time.monotonic() < deadline, f"not in {DEADLINE_S} s; events: {self.events}; {self.disk.stats()}"
            self.woken.wait(0.01)

    # --- writing and reading ------------------------------------------------------------------------------------------------

    def batch(
        self, filling: Filling, blocks: Sequence[tuple[BlockKey, int]], *, seal: bool = False, slot: int = 0
    ) -> tuple[WriteBatch, list[Written]]:
        """Fill slots from ``slot`` on with the blocks (key, length) and make a batch of them."""
        items: list[WriteRecord] = []
        written: list[Written] = []
        for i, (key, length) in enumerate(blocks):
            payload = payload_of(key, length)
            self.arena.slot(slot + i)[:length] = payload
            place = Place(filling.segment, filling.generation, filling.page, length)
            digest = xxhash.xxh3_64_intdigest(payload)
            record = Record(key, None, True, 16, length, digest, 1, 1000.0, FAR, b"meta")
            items.append(WriteRecord(place, record, slot + i))
            written.append(Written(key, place, digest))
            filling.entries.append(FooterEntry(key, None, True, filling.page, length, 16, FAR))
            filling.page += record_pages(length)
        footer = Footer(filling.page, tuple(filling.entries)) if seal else None
        if footer is not None:
            assert footer.page + footer_pages(len(footer.entries)) < self.segment_pages
        self.next_id += 1
        batch = WriteBatch(self.next_id, filling.segment, filling.generation, not filling.opened, 1, tuple(items), footer)
        filling.opened = True
        return batch, written

    def write(
        self, filling: Filling, blocks: Sequence[tuple[BlockKey, int]], *, seal: bool = False
    ) -> tuple[BatchWritten, list[Written]]:
        batch, written = self.batch(filling, blocks, seal=seal)
        self.disk.write(batch)
        return self.wait_for(BatchWritten, batch.id), written

    def read(self, key: BlockKey, place: Place, slot: int = 0) -> RecordRead:
        self.next_id += 1
        self.disk.read(ReadRecord(self.next_id, place, key, slot))
        return self.wait_for(RecordRead, self.next_id)

    def reads_right(self, written: Written) -> bool:
        """True for the right bytes, False for a miss; wrong bytes end the test."""
        answer = self.read(written.key, written.place)
        assert (answer.record is None) != (answer.fault is None)
        if answer.record is None:
            return False
        length = written.place.length
        assert bytes(self.arena.slot(0)[:length]) == payload_of(written.key, length), "wrong bytes"
        assert (answer.record.key, answer.record.length) == (written.key, length)
        return True
