"""Check an SSD directory that no node has open: every header, every payload. Reads only, changes nothing.

A record is *bad* if its bytes are not what was written, *expired* if its time is over, *dead* if a restart would not serve it
though it is sound (a younger record has its key, or a block before it is not there), else *good*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from kv_pool.ssd.disk.directory import LOCK_FILE, Directory, DirectoryInUseError, read_format
from kv_pool.ssd.disk.files import ScratchPool, SegmentFiles, direct_reads_work
from kv_pool.ssd.disk.filesystem import FileSystem
from kv_pool.ssd.disk.health import reason_of
from kv_pool.ssd.disk.recovery import SegmentReader
from kv_pool.ssd.format import (
    SEGMENT_MAGIC,
    decode_record_header,
    footer_entry,
    was_record_header,
    was_trailer,
)
from kv_pool.ssd.records import PAGE, FooterEntry, RecoveredSegment, SsdFormatError, record_pages
from kv_pool.ssd.recovery import worth_having

HEADER = "the record's header is damaged"
PAYLOAD = "the payload does not have its checksum"
CUT = "the file ends within the record"
FILE_CUT = "the file is shorter than a segment"
NO_RECORD = "no record is here, though one follows"
SEGMENT_HEADER = "the segment's header page is damaged"
FOOTER = "the segment's footer is damaged"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """``page`` is where the record's header is, or should be."""

    segment: int
    page: int
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Numbers of records, but for ``segments`` and ``bytes_checked``. ``damaged_pages`` are those of segment headers and footers,
    which cost no record."""

    segments: int = 0
    good: int = 0
    dead: int = 0
    expired: int = 0
    bad: int = 0
    damaged_pages: int = 0
    bytes_checked: int = 0


class Verification:
    """Opens ``directory`` and keeps nodes away from it until :meth:`close` (or the end of a ``with``).

    ``now`` is wall-clock seconds. Raises SsdFormatError where it is no SSD tier's directory or of another format,
    DirectoryInUseError where a node has it open, OSError.
    """

    def __init__(self, directory: str, *, now: float, filesystem: FileSystem | None = None) -> None:
        self._now = now
        self._filesystem = filesystem or FileSystem()
        fd = self._filesystem.open_directory(directory)
        lock = -1
        try:
            lock = self._lock(fd)
            found = read_format(fd, self._filesystem)
            if found is None:
                raise SsdFormatError(f"{directory} has no FORMAT file: it is not the directory of an SSD tier")
        except BaseException:
            for opened in (lock, fd):
                if opened >= 0:
                    self._filesystem.close(opened)
            raise
        self._directory = Directory(directory, fd, lock, found, self._filesystem)
        self._scratch = ScratchPool()
        with self._scratch.buffer() as buffer:
            direct = direct_reads_work(self._directory, buffer)
        self._files = SegmentFiles(self._directory, direct=direct, beat=lambda: None, writable=False)
        self.report = VerifyReport()
        """Complete when :meth:`bad_records` has come to its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nodes may have the directory again."""
        self._files.close()
        self._directory.close()

    def bad_records(self) -> Iterator[BadRecord]:
        """Every bad record, as it is found; also each damaged page of a segment's header and footer."""
        self.report = VerifyReport()
        sound: list[RecoveredSegment] = []
        for segment in self._directory.segments_found():
            self._count(segments=1)
            try:
                yield from self._check_segment(segment, sound)
            except OSError as error:
                self._count(bad=1)
                yield BadRecord(segment, 0, reason_of(error))
        self._judge(sound)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _lock(self, dir_fd: int) -> int:
        fd = self._filesystem.open(LOCK_FILE, os.O_RDONLY, dir_fd)
        if not self._filesystem.lock(fd):
            self._filesystem.close(fd)
            raise DirectoryInUseError("a node has the directory open: stop it first")
        return fd

    def _check_segment(self, segment: int, sound: list[RecoveredSegment]) -> Iterator[BadRecord]:
        with self._files.using(segment) as file, self._scratch.buffer() as buffer:
            layout = self._directory.format
            pages = self._directory.segment_pages
            reader = SegmentReader(file, buffer, store=layout.store, segment=segment, segment_pages=pages)
            header = reader.header()
            generation = reader.newest_generation() if header is None else header.generation
            if header is None and (generation is not None or self._begins(reader, 0, SEGMENT_MAGIC)):
                yield self._damaged(segment, 0, SEGMENT_HEADER)
            if generation is None:
                return
            if reader.pages < pages:
                yield self._damaged(segment, reader.pages, FILE_CUT)
            trailer = reader.trailer(generation)
            footer = reader.footer(trailer) if trailer is not None else None
            if footer is None and (trailer is not None or self._was_sealed(reader, segment, generation)):
                yield self._damaged(segment, pages - 1, FOOTER)
            expected = {entry.page: entry for entry in footer or ()}
            entries: list[FooterEntry] = []
            for found in reader.records(generation):
                yield from self._check_gap(segment, found.page - found.gap, found.page, expected)
                expected.pop(found.page, None)
                try:
                    reason = None if reader.payload_is_sound(found) else PAYLOAD
                except OSError as error:
                    reason = reason_of(error)
                self._count(bytes_checked=record_pages(found.record.length) * PAGE)
                if reason is None:
                    entries.append(footer_entry(found.page, found.record))
                else:
                    yield self._bad(segment, found.page, reason)
            yield from self._check_end(reader, segment, generation, expected)
            sound.append(RecoveredSegment(segment, generation, 0, footer is not None, pages, tuple(entries)))

    def _check_gap(self, segment: int, start: int, end: int, expected: dict[int, FooterEntry]) -> Iterator[BadRecord]:
        """Pages between two sound records that belong to neither."""
        page = start
        while page < end:
            entry = expected.pop(page, None)
            if entry is not None:
                yield self._bad(segment, page, HEADER)
                page += record_pages(entry.length)
                continue
            following = min((p for p in expected if page < p < end), default=end)
            yield self._bad(segment, page, NO_RECORD)
            page = following

    def _check_end(
        self, reader: SegmentReader, segment: int, generation: int, expected: dict[int, FooterEntry]
    ) -> Iterator[BadRecord]:
        """Behind the last sound record: what the footer still names, or what is not sound but was a record."""
        yield from (self._bad(segment, page, HEADER) for page in sorted(expected))
        at = reader.scanned_to
        if expected or at >= reader.pages:
            return
        page = bytes(reader.page(at))
        store = self._directory.format.store
        if decode_record_header(page, store=store, segment=segment, generation=generation, at=at) is not None:
            yield self._bad(segment, at, CUT)
        elif was_record_header(page, store=store, segment=segment, generation=generation, at=at):
            yield self._bad(segment, at, HEADER)

    def _begins(self, reader: SegmentReader, page: int, magic: bytes) -> bool:
        return page < reader.pages and bytes(reader.page(page)[: len(magic)]) == magic

    def _was_sealed(self, reader: SegmentReader, segment: int, generation: int) -> bool:
        last = self._directory.segment_pages - 1
        if last >= reader.pages:
            return False
        page = bytes(reader.page(last))
        return was_trailer(page, store=self._directory.format.store, segment=segment, generation=generation)

    def _judge(self, sound: list[RecoveredSegment]) -> None:
        """Which of the sound records a restart would serve."""
        total = sum(len(segment.entries) for segment in sound)
        alive = [
            replace(segment, entries=tuple(entry for entry in segment.entries if entry.expires_at > self._now))
            for segment in sound
        ]
        living = sum(len(segment.entries) for segment in alive)
        good = sum(1 for _ in worth_having(alive))
        self._count(good=good, dead=living - good, expired=total - living)

    def _bad(self, segment: int, page: int, reason: str) -> BadRecord:
        self._count(bad=1)
        return BadRecord(segment, page, reason)

    def _damaged(self, segment: int, page: int, reason: str) -> BadRecord:
        self._count(damaged_pages=1)
        return BadRecord(segment, page, reason)

    def _count(self, **more: int) -> None:
        self.report = replace(self.report, **{name: getattr(self.report, name) + number for name, number in more.items()})
