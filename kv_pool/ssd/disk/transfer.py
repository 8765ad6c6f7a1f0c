"""One batch written, one record read: on a disk thread, between a slot of the arena and a segment file."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from typing import Final

from kv_pool.ssd.disk.files import SCRATCH_PAGES, ScratchPool, SegmentFile, SegmentFiles
from kv_pool.ssd.format import (
    SegmentHeader,
    checksum,
    decode_record_header,
    encode_footer,
    encode_record_header,
    encode_segment_header,
    encode_trailer,
)
from kv_pool.ssd.records import PAGE, Footer, ReadRecord, Record, WriteBatch, WriteRecord, record_pages

CALL_BYTES_MAX: Final = 16 * 1024 * 1024
"""Written with one system call, where one record is not longer. Measured: more gains nothing."""
CALL_RECORDS_MAX: Final = SCRATCH_PAGES // 2
"""Each takes one scratch page for its header and at most one for the end of its payload, and three of the 1,024 pieces that the
kernel takes at a time."""

Slot = Callable[[int], memoryview]


class Transfers:
    """``store`` and sizes are those of the open directory. Both methods may run in several threads at a time."""

    def __init__(self, *, files: SegmentFiles, scratch: ScratchPool, slot: Slot, store: bytes, segment_pages: int) -> None:
        self._files = files
        self._scratch = scratch
        self._slot = slot
        self._store = store
        self._segment_pages = segment_pages

    def read(self, job: ReadRecord) -> Record | None:
        """The record, its payload in the slot; None where what lies there is not it, in any respect. Raises OSError, ValueError
        (the slot is too small)."""
        place = job.place
        payload = self._slot(job.slot)
        padded = (record_pages(place.length) - 1) * PAGE
        if padded > len(payload):
            raise ValueError(f"record {job.id}: {place.length} bytes do not fit a slot of {len(payload)}")
        with self._files.using(place.segment) as file, self._scratch.buffer() as scratch:
            file.check_linked()
            header = scratch[:PAGE]
            file.read([header, payload[:padded]] if padded else [header], place.page)
            record = decode_record_header(
                header, store=self._store, segment=place.segment, generation=place.generation, at=place.page
            )
        if record is None or record.key != job.key or record.length != place.length:
            return None
        return record if checksum(payload[: record.length]) == record.checksum else None

    def write(self, batch: WriteBatch, count: Callable[[int], None], opened: Callable[[], None]) -> None:
        """All of ``batch`` but its footer, on the medium when this returns. ``count`` is called with the bytes of each write
        before it is tried, ``opened`` when the segment's header page is on the medium. Raises OSError, ValueError (the batch
        contradicts itself)."""
        self._check(batch)
        with self._files.using(batch.segment, create=True) as file, self._scratch.buffer() as scratch:
            file.allocate()
            if batch.opens:
                self._open_segment(file, batch, scratch, count)
                opened()
            for items in _calls(batch.records):
                buffers = self._encode(items, scratch)
                count(sum(map(len, buffers)))
                file.write(buffers, items[0].place.page)
            file.sync()
            file.check_linked()

    def seal(self, batch: WriteBatch, footer: Footer, count: Callable[[int], None]) -> None:
        """The footer and trailer, on the medium when this returns; all that they name must be there before. Raises OSError,
        ValueError (it does not fit)."""
        content = encode_footer(footer.entries)
        last = self._segment_pages - 1
        if footer.page * PAGE + len(content) > last * PAGE:
            raise ValueError(f"batch {batch.id}: a footer of {len(content)} bytes does not fit at page {footer.page}")
        trailer = encode_trailer(self._store, batch.segment, batch.generation, footer.page, len(footer.entries), content)
        with self._files.using(batch.segment) as file, self._scratch.buffer() as scratch:
            if content:
                table = memoryview(mmap.mmap(-1, len(content))) if len(content) > len(scratch) else scratch[: len(content)]
                table[:] = content
                count(len(content))
                file.write([table], footer.page)
            scratch[:PAGE] = trailer
            count(PAGE)
            file.write([scratch[:PAGE]], last)
            file.sync()
            file.check_linked()

    def _check(self, batch: WriteBatch) -> None:
        end = self._segment_pages if batch.footer is None else min(batch.footer.page, self._segment_pages - 1)
        for item in batch.records:
            place, length = item.place, item.record.length
            sound = (place.segment, place.generation, place.length) == (batch.segment, batch.generation, length)
            if not sound or place.page < 1 or place.page + record_pages(length) > end or length > len(self._slot(item.slot)):
                raise ValueError(f"batch {batch.id}: a record does not fit at {place}")

    def _open_segment(self, file: SegmentFile, batch: WriteBatch, scratch: memoryview, count: Callable[[int], None]) -> None:
        """On the medium before the first record of its generation: a header page never names an older generation than a record
        behind it."""
        header = SegmentHeader(batch.segment, batch.generation, batch.retention, self._segment_pages, time.time())
        scratch[:PAGE] = encode_segment_header(self._store, header)
        count(PAGE)
        file.write([scratch[:PAGE]], 0)
        file.sync()

    def _encode(self, items: list[WriteRecord], scratch: memoryview) -> list[memoryview]:
        """Headers into ``scratch``, payloads as they lie in their slots. What follows a payload in its last page is zero: a slot
        may hold the end of another block there."""
        buffers: list[memoryview] = []
        pages = (scratch[at : at + PAGE] for at in range(0, len(scratch), PAGE))
        for item in items:
            header, payload, length = next(pages), self._slot(item.slot), item.record.length
            header[:] = encode_record_header(self._store, item.place, item.record)
            buffers.append(header)
            whole = length // PAGE * PAGE
            if whole:
                buffers.append(payload[:whole])
            if length > whole:
                last = next(pages)
                last[: length - whole] = payload[whole:length]
                last[length - whole :] = bytes(PAGE - (length - whole))
                buffers.append(last)
        return buffers


def _calls(records: tuple[WriteRecord, ...]) -> Iterator[list[WriteRecord]]:
    """The records in runs that lie one behind the other, each for one system call."""
    run: list[WriteRecord] = []
    size = 0
    for item in records:
        bytes_needed = record_pages(item.record.length) * PAGE
        if run and (
            item.place.page != run[-1].place.page + record_pages(run[-1].record.length)
            or size + bytes_needed > CALL_BYTES_MAX
            or len(run) == CALL_RECORDS_MAX
        ):
            yield run
            run, size = [], 0
        run.append(item)
        size += bytes_needed
    if run:
        yield run
