"""The SSD tier's bytes: encode and decode, nothing else. Little-endian, times in milliseconds, checksums XXH3-64.

::

    segment   page 0            header page: who this segment is, which generation, for which retention
              page 1 ...        records: a header page, then the payload, padded to whole pages
              behind them       (sealed) footer: one entry per record worth finding
              last page         (sealed) trailer: where the footer lies, and its checksum

Header page, record header and trailer are one page each and end with the checksum of all that precedes it in the page, so no bit
of them can change unnoticed. A page that differs in anything from what is expected (magic, version, store, segment, generation,
page) is simply *not that page*: decoding answers None, since torn writes and earlier generations are what a log normally finds
behind its end. Only a directory of another format is an error.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import xxhash

from kv_pool.keys import BlockKey
from kv_pool.ssd.records import FOOTER_ENTRY_BYTES, META_BYTES_MAX, PAGE, FooterEntry, Place, Record, SsdFormatError
from kv_pool.ssd.records import from_milliseconds as seconds
from kv_pool.ssd.records import to_milliseconds as milliseconds

VERSION: Final = 1
FORMAT_NAME: Final = "moonpool-ssd"
STORE_BYTES: Final = 16

SEGMENT_MAGIC: Final = b"MOONSEG1"
RECORD_MAGIC: Final = b"MOONREC1"
TRAILER_MAGIC: Final = b"MOONEND1"
BUDGET_MAGIC: Final = b"MOONBUD1"

_HEAD = struct.Struct("<8sH16sIQ")
_PLACE = struct.Struct("<8sH16sIQI")
_SEGMENT = struct.Struct("<8sH16sIQBIQ")
_RECORD = struct.Struct("<8sH16sIQI16s16sBIQQBQQH")
_ENTRY = struct.Struct("<16s16sBIQIQ")
_TRAILER = struct.Struct("<8sH16sIQIIQ")
_BUDGET = struct.Struct("<8sHI")
_CHECKSUM = struct.Struct("<Q")

_HAS_PARENT = 1
_FIRST = 2
_NO_KEY = bytes(16)

assert _ENTRY.size == FOOTER_ENTRY_BYTES
assert _RECORD.size + META_BYTES_MAX + _CHECKSUM.size <= PAGE

Buffer = bytes | bytearray | memoryview


def checksum(content: Buffer) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(content)


def generation_of(page: Buffer, *, store: bytes, segment: int) -> int | None:
    """The generation that a sound page of any of the three kinds names; None where it is none, or of another store or segment.

    All of them begin alike: magic, version, store, segment, generation.
    """
    if not _sound(page):
        return None
    magic, version, owner, number, generation = _HEAD.unpack_from(page)
    known = magic in (SEGMENT_MAGIC, RECORD_MAGIC, TRAILER_MAGIC) and version == VERSION
    return generation if known and (owner, number) == (store, segment) else None


# --- segment header ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """``created`` in wall-clock seconds."""

    segment: int
    generation: int
    retention: int
    segment_pages: int
    created: float


def encode_segment_header(store: bytes, header: SegmentHeader) -> bytes:
    """One page."""
    return _page(
        _SEGMENT.pack(
            SEGMENT_MAGIC,
            VERSION,
            store,
            header.segment,
            header.generation,
            header.retention,
            header.segment_pages,
            milliseconds(header.created),
        )
    )


def decode_segment_header(page: Buffer, *, store: bytes, segment: int, segment_pages: int) -> SegmentHeader | None:
    if not _sound(page):
        return None
    magic, version, owner, number, generation, retention, pages, created = _SEGMENT.unpack_from(page)
    if (magic, version, owner, number, pages) != (SEGMENT_MAGIC, VERSION, store, segment, segment_pages):
        return None
    return SegmentHeader(number, generation, retention, pages, seconds(created))


# --- record header ----------------------------------------------------------------------------------------------------------


def encode_record_header(store: bytes, place: Place, record: Record) -> bytes:
    """One page. The payload that follows it has ``record.length`` bytes. Raises ValueError where the meta is too long."""
    if len(record.meta) > META_BYTES_MAX:
        raise ValueError(f"{len(record.meta)} bytes of meta, at most {META_BYTES_MAX} are allowed")
    return _page(
        _RECORD.pack(
            RECORD_MAGIC,
            VERSION,
            store,
            place.segment,
            place.generation,
            place.page,
            record.key,
            record.parent or _NO_KEY,
            _flags(record.parent, record.first),
            record.tokens,
            record.length,
            record.checksum,
            record.retention,
            milliseconds(record.written_at),
            milliseconds(record.expires_at),
            len(record.meta),
        )
        + record.meta
    )


def decode_record_header(page: Buffer, *, store: bytes, segment: int, generation: int, at: int) -> Record | None:
    """The record whose header is ``page``, read from page ``at`` of the segment; None where it is not one, or not of there.
    Its payload is still to be checked against ``checksum``."""
    if not _sound(page):
        return None
    (
        magic,
        version,
        owner,
        number,
        written_in,
        written_at_page,
        key,
        parent,
        flags,
        tokens,
        length,
        digest,
        retention,
        written_at,
        expires_at,
        meta_length,
    ) = _RECORD.unpack_from(page)
    found = (magic, version, owner, number, written_in, written_at_page)
    if found != (RECORD_MAGIC, VERSION, store, segment, generation, at) or meta_length > META_BYTES_MAX:
        return None
    return Record(
        key=BlockKey(key),
        parent=BlockKey(parent) if flags & _HAS_PARENT else None,
        first=bool(flags & _FIRST),
        tokens=tokens,
        length=length,
        checksum=digest,
        retention=retention,
        written_at=seconds(written_at),
        expires_at=seconds(expires_at),
        meta=bytes(page[_RECORD.size : _RECORD.size + meta_length]),
    )


def was_record_header(page: Buffer, *, store: bytes, segment: int, generation: int, at: int) -> bool:
    """Whether a page that is not sound is a record header of there with some damage. For telling people only."""
    return _was(page, _PLACE.pack(RECORD_MAGIC, VERSION, store, segment, generation, at))


def was_trailer(page: Buffer, *, store: bytes, segment: int, generation: int) -> bool:
    """Whether a page that is not sound is the trailer of that generation with some damage."""
    return _was(page, _HEAD.pack(TRAILER_MAGIC, VERSION, store, segment, generation))


# --- footer and trailer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trailer:
    """The footer begins at ``page`` and has so many ``entries``; ``checksum`` is over its whole pages."""

    page: int
    entries: int
    checksum: int

    @property
    def footer_bytes(self) -> int:
        return -(-self.entries * _ENTRY.size // PAGE) * PAGE


def encode_footer(entries: Iterable[FooterEntry]) -> bytes:
    """Whole pages."""
    packed = b"".join(
        _ENTRY.pack(
            entry.key,
            entry.parent or _NO_KEY,
            _flags(entry.parent, entry.first),
            entry.page,
            entry.length,
            entry.tokens,
            milliseconds(entry.expires_at),
        )
        for entry in entries
    )
    return packed + bytes(-len(packed) % PAGE)


def encode_trailer(store: bytes, segment: int, generation: int, page: int, entries: int, footer: Buffer) -> bytes:
    """One page, the last of the segment. ``footer`` is what :func:`encode_footer` made, written from ``page`` on."""
    return _page(
        _TRAILER.pack(TRAILER_MAGIC, VERSION, store, segment, generation, page, entries, checksum(footer)),
    )


def decode_trailer(page: Buffer, *, store: bytes, segment: int, generation: int, segment_pages: int) -> Trailer | None:
    """None where the segment is not sealed in this generation."""
    if not _sound(page):
        return None
    magic, version, owner, number, sealed_in, first_page, entries, digest = _TRAILER.unpack_from(page)
    if (magic, version, owner, number, sealed_in) != (TRAILER_MAGIC, VERSION, store, segment, generation):
        return None
    trailer = Trailer(first_page, entries, digest)
    return trailer if first_page >= 1 and first_page * PAGE + trailer.footer_bytes <= (segment_pages - 1) * PAGE else None


def decode_footer(footer: Buffer, trailer: Trailer) -> tuple[FooterEntry, ...] | None:
    """The entries of the ``trailer.footer_bytes`` bytes read from page ``trailer.page``; None where they are spoiled."""
    if len(footer) != trailer.footer_bytes or checksum(footer) != trailer.checksum:
        return None
    entries: list[FooterEntry] = []
    for key, parent, flags, page, length, tokens, expires in _ENTRY.iter_unpack(footer[: trailer.entries * _ENTRY.size]):
        owner = BlockKey(parent) if flags & _HAS_PARENT else None
        entries.append(FooterEntry(BlockKey(key), owner, bool(flags & _FIRST), page, length, tokens, seconds(expires)))
    return tuple(entries)


def footer_entry(page: int, record: Record) -> FooterEntry:
    """What a footer says of ``record``, whose header lies at ``page``: for the scan of an unsealed segment."""
    return FooterEntry(record.key, record.parent, record.first, page, record.length, record.tokens, record.expires_at)


# --- the directory's own files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DirectoryFormat:
    """What the file FORMAT says."""

    store: bytes
    segment_bytes: int
    segments: int


def encode_format(directory: DirectoryFormat) -> bytes:
    described = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "store": directory.store.hex(),
        "segment_bytes": directory.segment_bytes,
        "segments": directory.segments,
    }
    return (json.dumps(described, indent=1) + "\n").encode()


def decode_format(content: bytes) -> DirectoryFormat:
    """Raises SsdFormatError where this is no FORMAT file, or one of a version that is not known here."""
    try:
        described: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SsdFormatError(f"the SSD directory's FORMAT file is not JSON: {error}") from None
    if not isinstance(described, dict):
        raise SsdFormatError("the SSD directory's FORMAT file holds no JSON object")
    fields = cast("dict[str, Any]", described)
    if fields.get("format") != FORMAT_NAME:
        raise SsdFormatError(f"the SSD directory holds {fields.get('format')!r}, not {FORMAT_NAME!r}")
    if fields.get("version") != VERSION or isinstance(fields.get("version"), bool):
        raise SsdFormatError(f"the SSD directory has format version {fields.get('version')!r}, known here is {VERSION}")
    store, sizes = fields.get("store"), (fields.get("segment_bytes"), fields.get("segments"))
    if not isinstance(store, str) or not re.fullmatch(f"[0-9a-f]{{{2 * STORE_BYTES}}}", store):
        raise SsdFormatError("the SSD directory's FORMAT file names no store")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise SsdFormatError(f"the SSD directory's FORMAT file names impossible sizes: {sizes}")
    return DirectoryFormat(bytes.fromhex(store), cast("int", sizes[0]), cast("int", sizes[1]))


def encode_budget(packed: bytes) -> bytes:
    """The file BUDGET around a packed write budget."""
    framed = _BUDGET.pack(BUDGET_MAGIC, VERSION, len(packed)) + packed
    return framed + _CHECKSUM.pack(checksum(framed))


def decode_budget(content: bytes) -> bytes | None:
    """The packed write budget, None where the file is spoiled."""
    if len(content) < _BUDGET.size + _CHECKSUM.size:
        return None
    framed, (digest,) = content[: -_CHECKSUM.size], _CHECKSUM.unpack(content[-_CHECKSUM.size :])
    magic, version, length = _BUDGET.unpack_from(framed)
    if (magic, version, length) != (BUDGET_MAGIC, VERSION, len(framed) - _BUDGET.size) or checksum(framed) != digest:
        return None
    return framed[_BUDGET.size :]


# --- inside -----------------------------------------------------------------------------------------------------------------


def _flags(parent: BlockKey | None, first: bool) -> int:
    return (_HAS_PARENT if parent is not None else 0) | (_FIRST if first else 0)


def _page(content: bytes) -> bytes:
    body = content + bytes(PAGE - _CHECKSUM.size - len(content))
    return body + _CHECKSUM.pack(checksum(body))


def _was(page: Buffer, head: bytes) -> bool:
    """It begins like that, or is sound once it does."""
    return len(page) == PAGE and (page[: len(head)] == head or _sound(head + bytes(page[len(head) :])))


def _sound(page: Buffer) -> bool:
    return len(page) == PAGE and checksum(page[: -_CHECKSUM.size]) == _CHECKSUM.unpack_from(page, PAGE - _CHECKSUM.size)[0]
