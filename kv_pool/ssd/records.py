"""What the SSD tier's two halves say to each other: the log decides (pure), the disk does. Types only.

The log hands out :class:`WriteBatch` and :class:`ReadRecord`; the disk answers each of them exactly once, and only when no thread
touches its slots any more. All times are wall-clock seconds, all lengths bytes, all pages :data:`PAGE` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kv_pool.keys import BlockKey

PAGE: Final = 4096
META_BYTES_MAX: Final = 2048
LENGTH_MAX: Final = (1 << 32) - 1
"""Longest payload of one record, bytes."""
TOKENS_MAX: Final = (1 << 31) - 1
RETENTIONS_MAX: Final = 256


class SsdFormatError(Exception):
    """These bytes are not what they should be, or of a format that this version does not know. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies: its header page at ``page``, ``length`` bytes of payload from ``page + 1`` on. A place is void as soon
    as its segment has another ``generation``."""

    segment: int
    generation: int
    page: int
    length: int


@dataclass(frozen=True, slots=True)
class Record:
    """What the header page says of a block. ``first``: nothing on the medium needs to precede it, because it has no parent or its
    parent was not on the medium when this was written. Any other record is worthless without its parent."""

    key: BlockKey
    parent: BlockKey | None
    first: bool
    tokens: int
    length: int
    checksum: int
    """XXH3-64 of the payload, as the block's writer gave it."""
    retention: int
    written_at: float
    expires_at: float
    meta: bytes


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """``slot`` of the arena holds the payload and stays as it is until the batch is answered."""

    place: Place
    record: Record
    slot: int


@dataclass(frozen=True, slots=True)
class FooterEntry:
    """One record as its segment's footer tells it (``first`` as in :class:`Record`)."""

    key: BlockKey
    parent: BlockKey | None
    first: bool
    page: int
    length: int
    tokens: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Footer:
    """The table of what is worth finding in a sealed segment, in order of pages. It begins at ``page``; its trailer is in the
    segment's last page."""

    page: int
    entries: tuple[FooterEntry, ...]


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """One group commit in one segment: where it ``opens`` it, the header page of the new generation; the records; the footer and
    its trailer where there is one; then one fdatasync; then :class:`BatchWritten`.

    Records lie one behind the other; the first follows the header page or the batch before."""

    id: int
    segment: int
    generation: int
    opens: bool
    retention: int
    records: tuple[WriteRecord, ...]
    footer: Footer | None


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read the record of ``key`` at ``place`` into ``slot``, and check all of it."""

    id: int
    place: Place
    key: BlockKey
    slot: int


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """What a segment file holds at the start: ``entries`` in write order. An unsealed one is written on from ``used_pages``."""

    id: int
    generation: int
    retention: int
    sealed: bool
    used_pages: int
    entries: tuple[FooterEntry, ...]


# --- what the disk tells ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskUp:
    """The directory is open and read. ``budget`` is what was saved last, ``store`` its id (hexadecimal)."""

    segments: tuple[RecoveredSegment, ...]
    budget: bytes | None
    store: str


@dataclass(frozen=True, slots=True)
class DiskDown:
    """``reason`` is for people: "hung", "no space", "input/output error", "read-only", "gone". No paths."""

    reason: str


@dataclass(frozen=True, slots=True)
class BatchWritten:
    """``bytes_written`` counts what really went to the medium: headers, padding, footer, also of a failed batch."""

    id: int
    ok: bool
    bytes_written: int


Fault = Literal["corrupt", "io"]


@dataclass(frozen=True, slots=True)
class RecordRead:
    """The record and no ``fault``, or a fault and no record."""

    id: int
    record: Record | None
    fault: Fault | None


DiskEvent = DiskUp | DiskDown | BatchWritten | RecordRead


# --- sizes ------------------------------------------------------------------------------------------------------------------

FOOTER_ENTRY_BYTES: Final = 57


def record_pages(length: int) -> int:
    """Pages that a record with ``length`` bytes of payload takes: its header page and the payload rounded up."""
    return 1 + -(-length // PAGE)


def footer_pages(entries: int) -> int:
    """Pages that a footer of so many entries takes, its trailer's page not counted."""
    return -(-entries * FOOTER_ENTRY_BYTES // PAGE)


def batch_bytes(batch: WriteBatch) -> int:
    """Bytes that writing ``batch`` takes."""
    pages = int(batch.opens) + sum(record_pages(item.record.length) for item in batch.records)
    if batch.footer is not None:
        pages += footer_pages(len(batch.footer.entries)) + 1
    return pages * PAGE


def to_milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def from_milliseconds(milliseconds: int) -> float:
    """Seconds. The two are exact inverses for every time that came from here."""
    return milliseconds / 1000
