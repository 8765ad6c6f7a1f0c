"""What a segment file holds: its footer where that is sound, else a scan of its record headers.

The scan goes from record to record, as long as each begins where the one before ended. Where a header is not sound it looks at
every page behind it for the next one, so that a flipped byte costs one record. It ends

- at the end of the file, or of what was ever written into it (an allocated page that was never written is skipped unread);
- at a sound header of an *earlier* generation: the log has not come this far yet.

In a segment that is reused, an earlier generation's payload may lie where the log ended; then the rest of the segment is read for
nothing. That is at most one open segment per retention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from kv_pool.ssd.disk.files import SCRATCH_PAGES, ScratchPool, SegmentFile, SegmentFiles
from kv_pool.ssd.format import (
    RECORD_MAGIC,
    SegmentHeader,
    Trailer,
    decode_footer,
    decode_record_header,
    decode_segment_header,
    decode_trailer,
    footer_entry,
    generation_of,
)
from kv_pool.ssd.records import PAGE, FooterEntry, Record, RecoveredSegment, record_pages

_MAGIC: Final = np.frombuffer(RECORD_MAGIC, dtype="<u8")[0]
WINDOW_PAGES_SMALL: Final = 1
"""Read at a time while records are large: only their headers are wanted."""
LARGE_RECORD_PAGES: Final = 32
"""From here on, skipping a payload is cheaper than reading it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A sound record header at ``page``. ``gap``: pages before it that belong to no sound record."""

    page: int
    record: Record
    gap: int


class Window:
    """Pages of a file, read as they are asked for."""

    def __init__(self, file: SegmentFile, buffer: memoryview, pages: int) -> None:
        self._file = file
        self._buffer = buffer
        self.pages = pages
        """In the file."""
        self._first = 0
        self._count = 0

    def page(self, page: int, ahead: int = 1) -> memoryview:
        """One page, valid until the next call; ``ahead`` pages are read at once where it is not there yet. Raises OSError."""
        return self.run(page, ahead)[:PAGE]

    def run(self, page: int, ahead: int) -> memoryview:
        """``page`` and all that follows it in the window."""
        if not self._first <= page < self._first + self._count:
            count = min(ahead, self.pages - page, len(self._buffer) // PAGE)
            self._count = 0
            self._file.read([self._buffer[: count * PAGE]], page)
            self._first, self._count = page, count
        start = (page - self._first) * PAGE
        return self._buffer[start : self._count * PAGE]


class SegmentReader:
    """Reads one segment file of the store; to be used by one thread."""

    def __init__(self, file: SegmentFile, buffer: memoryview, *, store: bytes, segment: int, segment_pages: int) -> None:
        self._file = file
        self._window = Window(file, buffer, file.pages())
        self._store = store
        self._segment = segment
        self._segment_pages = segment_pages
        self.scanned_to = 1

    @property
    def pages(self) -> int:
        """In the file: fewer than a segment's where it was cut."""
        return self._window.pages

    def header(self) -> SegmentHeader | None:
        """Raises OSError."""
        if not self.pages:
            return None
        page = self._window.page(0)
        return decode_segment_header(page, store=self._store, segment=self._segment, segment_pages=self._segment_pages)

    def trailer(self, generation: int) -> Trailer | None:
        """None where the segment is not sealed in this ``generation``. Raises OSError."""
        last = self._segment_pages - 1
        if self.pages <= last:
            return None
        pages = self._segment_pages
        page = self._window.page(last)
        return decode_trailer(page, store=self._store, segment=self._segment, generation=generation, segment_pages=pages)

    def footer(self, trailer: Trailer) -> tuple[FooterEntry, ...] | None:
        """None where it is spoiled. Raises OSError."""
        content = bytearray()
        for page in range(trailer.page, trailer.page + trailer.footer_bytes // PAGE):
            content += self._window.page(page, SCRATCH_PAGES)
        return decode_footer(content, trailer)

    def newest_generation(self) -> int | None:
        """The highest that any page names, for a segment whose header page is spoiled. Reads all of it. Raises OSError."""
        newest: int | None = None
        for page in self._marked_pages(1):
            generation = self._generation_at(page)
            if generation is not None and (newest is None or generation > newest):
                newest = generation
        if self.pages == self._segment_pages:
            sealed = self._generation_at(self._segment_pages - 1)
            newest = max((g for g in (newest, sealed) if g is not None), default=None)
        return newest

    def records(self, generation: int) -> Iterator[Found]:
        """Every sound header of that generation whose payload is in the file, in order of pages. ``scanned_to`` is then where the
        last record ended and no other followed. Raises OSError."""
        page, ahead, gap_from = 1, WINDOW_PAGES_SMALL, 1
        while page < self.pages:
            self.scanned_to = gap_from
            record = self._record_at(page, generation, ahead)
            if record is None:
                earlier = self._generation_at(page)
                if earlier is not None and earlier < generation:
                    return
                page = next(self._sound_pages(page + 1, generation), self.pages)
                continue
            pages = record_pages(record.length)
            if page + pages > self.pages:
                return
            yield Found(page, record, page - gap_from)
            ahead = SCRATCH_PAGES if pages < LARGE_RECORD_PAGES else WINDOW_PAGES_SMALL
            page = gap_from = page + pages
        self.scanned_to = gap_from

    def page(self, page: int) -> memoryview:
        """Valid until the next call of anything here. Raises OSError."""
        return self._window.page(page)

    def payload_is_sound(self, found: Found) -> bool:
        """Reads all of it. Raises OSError."""
        digest, page, left = xxhash.xxh3_64(), found.page + 1, found.record.length
        while left:
            run = self._window.run(page, SCRATCH_PAGES)[:left]
            digest.update(run)
            page, left = page + len(run) // PAGE, left - len(run)
        return digest.intdigest() == found.record.checksum

    def _record_at(self, page: int, generation: int, ahead: int) -> Record | None:
        content = self._window.page(page, ahead)
        return decode_record_header(content, store=self._store, segment=self._segment, generation=generation, at=page)

    def _generation_at(self, page: int) -> int | None:
        return generation_of(self._window.page(page), store=self._store, segment=self._segment)

    def _sound_pages(self, page: int, generation: int) -> Iterator[int]:
        return (p for p in self._marked_pages(page) if self._record_at(p, generation, SCRATCH_PAGES) is not None)

    def _marked_pages(self, page: int) -> Iterator[int]:
        """Pages from ``page`` on that begin like a record header. The window may move between two of them."""
        while page < self.pages:
            data = self._file.next_data(page)
            if data is None or data >= self.pages:
                return
            page = data
            run = self._window.run(page, SCRATCH_PAGES)
            marks = np.frombuffer(run, dtype="<u8")[:: PAGE // 8] == _MAGIC
            behind = page + len(marks)
            yield from (page + int(i) for i in np.flatnonzero(marks))
            page = behind


def recover_segment(
    files: SegmentFiles, scratch: ScratchPool, *, store: bytes, segment: int, segment_pages: int
) -> RecoveredSegment | None:
    """What the segment file holds; None where it was never opened (or nothing of it is left). Raises OSError."""
    with files.using(segment) as file, scratch.buffer() as buffer:
        reader = SegmentReader(file, buffer, store=store, segment=segment, segment_pages=segment_pages)
        header = reader.header()
        generation = reader.newest_generation() if header is None else header.generation
        if generation is None:
            return None
        trailer = reader.trailer(generation)
        entries = None if trailer is None else reader.footer(trailer)
        found = [] if entries is not None and header is not None else list(reader.records(generation))
        retention = header.retention if header is not None else found[0].record.retention if found else 0
        if entries is not None:
            return RecoveredSegment(segment, generation, retention, True, segment_pages, entries)
        used = found[-1].page + record_pages(found[-1].record.length) if found else 1
        # One that was sealed stays so: what is behind its records is not free to be written.
        sealed = trailer is not None or header is None or reader.pages < segment_pages
        return RecoveredSegment(
            id=segment,
            generation=generation,
            retention=retention,
            sealed=sealed,
            used_pages=segment_pages if sealed else used,
            entries=tuple(footer_entry(item.page, item.record) for item in found),
        )
