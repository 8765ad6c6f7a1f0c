"""The bytes on the SSD: as they were in version 1, and refused when anything about them is wrong."""

from __future__ import annotations

import dataclasses
import json

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given

from kv_pool.keys import BlockKey
from kv_pool.ssd import format as layout
from kv_pool.ssd.records import PAGE, FooterEntry, Place, Record, SsdFormatError

STORE = bytes(range(16))
PLACE = Place(segment=3, generation=9, page=17, length=5000)
RECORD = Record(
    key=BlockKey(b"k" * 16),
    parent=BlockKey(b"p" * 16),
    first=False,
    tokens=64,
    length=5000,
    checksum=0x1122334455667788,
    retention=2,
    written_at=1_790_000_000.125,
    expires_at=1_790_000_600.125,
    meta=b"meta",
)
ENTRIES = (
    FooterEntry(BlockKey(b"a" * 16), None, True, 1, 4096, 64, 1_790_000_600.125),
    FooterEntry(BlockKey(b"b" * 16), BlockKey(b"a" * 16), False, 3, 0, 64, 1_790_000_601.5),
)
HEADER = layout.SegmentHeader(3, 9, 2, 64, 1_790_000_000.5)


def record_page() -> bytes:
    return layout.encode_record_header(STORE, PLACE, RECORD)


def read_record(page: bytes, **changed: object) -> Record | None:
    expected = {"store": STORE, "segment": 3, "generation": 9, "at": 17} | changed
    return layout.decode_record_header(page, **expected)  # type: ignore[arg-type]


def trailer_page() -> bytes:
    return layout.encode_trailer(STORE, 3, 9, 5, len(ENTRIES), layout.encode_footer(ENTRIES))


def read_trailer(page: bytes, **changed: object) -> layout.Trailer | None:
    expected = {"store": STORE, "segment": 3, "generation": 9, "segment_pages": 64} | changed
    return layout.decode_trailer(page, **expected)  # type: ignore[arg-type]


def segment_page() -> bytes:
    return layout.encode_segment_header(STORE, HEADER)


def read_segment(page: bytes, **changed: object) -> layout.SegmentHeader | None:
    expected = {"store": STORE, "segment": 3, "segment_pages": 64} | changed
    return layout.decode_segment_header(page, **expected)  # type: ignore[arg-type]


def test_golden_bytes() -> None:
    """A change of any of these is another format version."""
    assert (
        segment_page()
        .hex()
        .startswith(
            "4d4f4f4e534547310100" + STORE.hex() + "03000000" + "0900000000000000" + "02" + "40000000" + "f46d50c4a0010000" + "00"
        )
    )
    assert (
        record_page()
        .hex()
        .startswith(
            "4d4f4f4e524543310100" + STORE.hex() + "03000000" + "0900000000000000" + "11000000" + "6b" * 16 + "70" * 16 + "01"
            "40000000"
            + "8813000000000000"
            + "8877665544332211"
            + "02"
            + "7d6c50c4a0010000"
            + "3d9459c4a0010000"
            + "0400"
            + "6d657461"
        )
    )
    assert (
        trailer_page()
        .hex()
        .startswith("4d4f4f4e454e44310100" + STORE.hex() + "03000000" + "0900000000000000" + "05000000" + "02000000")
    )
    digests = [xxhash.xxh3_64_hexdigest(page) for page in (segment_page(), record_page(), trailer_page())]
    assert [*digests, xxhash.xxh3_64_hexdigest(layout.encode_footer(ENTRIES))] == GOLDEN


GOLDEN = ["d3c810ab2d8023b8", "f684f9a7496f4f12", "c84c11ca8c93afcb", "8a26b4cad25a41c8"]


def test_what_was_written_is_read() -> None:
    assert read_record(record_page()) == RECORD
    assert read_segment(segment_page()) == HEADER
    trailer = read_trailer(trailer_page())
    assert trailer is not None
    assert layout.decode_footer(layout.encode_footer(ENTRIES), trailer) == ENTRIES
    assert {len(record_page()), len(segment_page()), len(trailer_page()), len(layout.encode_footer(ENTRIES))} == {PAGE}
    assert read_record(memoryview(record_page())) == RECORD, "straight from a slot"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("page", "read"), [(record_page(), read_record), (segment_page(), read_segment), (trailer_page(), read_trailer)]
)
def test_a_flipped_bit_anywhere_is_noticed(page: bytes, read: object) -> None:
    assert callable(read)
    for position in range(PAGE):
        spoiled = bytearray(page)
        spoiled[position] ^= 1 << position % 8
        assert read(bytes(spoiled)) is None
    assert read(page[:-1]) is None
    assert read(b"") is None
    assert read(bytes(PAGE)) is None
    assert read(page) is not None


@pytest.mark.parametrize("changed", [{"store": bytes(16)}, {"segment": 4}, {"generation": 8}, {"generation": 10}, {"at": 18}])
def test_a_record_of_somewhere_else_is_none(changed: dict[str, object]) -> None:
    assert read_record(record_page(), **changed) is None


@pytest.mark.parametrize("changed", [{"store": bytes(16)}, {"segment": 4}, {"segment_pages": 65}])
def test_a_header_of_another_segment_is_none(changed: dict[str, object]) -> None:
    assert read_segment(segment_page(), **changed) is None


@pytest.mark.parametrize("changed", [{"store": bytes(16)}, {"segment": 4}, {"generation": 10}, {"segment_pages": 6}])
def test_a_trailer_of_another_segment_is_none(changed: dict[str, object]) -> None:
    assert read_trailer(trailer_page(), **changed) is None


@pytest.mark.parametrize(
    ("page", "read"), [(record_page(), read_record), (segment_page(), read_segment), (trailer_page(), read_trailer)]
)
@pytest.mark.parametrize("position", [0, 8])
def test_another_magic_or_version_is_none_even_with_a_sound_checksum(page: bytes, read: object, position: int) -> None:
    assert callable(read)
    forged = bytearray(page)
    forged[position] += 1
    forged[-8:] = xxhash.xxh3_64_intdigest(bytes(forged[:-8])).to_bytes(8, "little")
    assert read(bytes(forged)) is None


def test_a_spoiled_footer_is_none() -> None:
    footer, trailer = layout.encode_footer(ENTRIES), read_trailer(trailer_page())
    assert trailer is not None
    for position in range(0, PAGE, 7):
        spoiled = bytearray(footer)
        spoiled[position] ^= 0x40
        assert layout.decode_footer(bytes(spoiled), trailer) is None
    assert layout.decode_footer(footer + bytes(PAGE), trailer) is None


keys = st.binary(min_size=16, max_size=16).map(BlockKey)
instants = st.integers(0, 1 << 42).map(lambda milliseconds: milliseconds / 1000)
records = st.builds(
    Record,
    key=keys,
    parent=st.none() | keys,
    first=st.booleans(),
    tokens=st.integers(0, (1 << 31) - 1),
    length=st.integers(0, (1 << 32) - 1),
    checksum=st.integers(0, (1 << 64) - 1),
    retention=st.integers(0, 255),
    written_at=instants,
    expires_at=instants,
    meta=st.binary(max_size=2048),
)


@given(records)
def test_every_record_is_read_as_it_was_written(record: Record) -> None:
    assert read_record(layout.encode_record_header(STORE, PLACE, record)) == record


@given(st.lists(records, max_size=200))
def test_every_footer_is_read_as_it_was_written(several: list[Record]) -> None:
    entries = tuple(layout.footer_entry(number, record) for number, record in enumerate(several))
    footer = layout.encode_footer(entries)
    trailer = read_trailer(layout.encode_trailer(STORE, 3, 9, 5, len(entries), footer))
    assert trailer is not None
    assert len(footer) == trailer.footer_bytes
    assert layout.decode_footer(footer, trailer) == entries


@given(st.binary(max_size=PAGE + 1))
def test_noise_is_none(noise: bytes) -> None:
    page = noise.ljust(PAGE, b"\0")
    assert read_record(page) is read_segment(page) is read_trailer(page) is None


def test_too_long_a_meta_is_refused() -> None:
    with pytest.raises(ValueError):
        layout.encode_record_header(STORE, PLACE, dataclasses.replace(RECORD, meta=bytes(2049)))


# --- the directory's own files ----------------------------------------------------------------------------------------------

DIRECTORY = layout.DirectoryFormat(STORE, 256 << 20, 40)


def described(**changed: object) -> bytes:
    return json.dumps(json.loads(layout.encode_format(DIRECTORY)) | changed).encode()


def test_the_directory_is_read_as_it_was_written() -> None:
    assert layout.decode_format(layout.encode_format(DIRECTORY)) == DIRECTORY
    assert layout.decode_format(described(later="field")) == DIRECTORY


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b"[" * 100_000,
        described(format="other"),
        described(version=2),
        described(version=True),
        described(version=None),
        described(store="00"),
        described(store=3),
        described(segment_bytes=0),
        described(segments=-1),
        described(segments=True),
        described(segments="40"),
    ],
)
def test_a_directory_of_another_format_is_an_error(content: bytes) -> None:
    with pytest.raises(SsdFormatError):
        layout.decode_format(content)


def test_a_budget_file_is_read_or_none() -> None:
    content = layout.encode_budget(b"history")
    assert layout.decode_budget(content) == b"history"
    assert layout.decode_budget(layout.encode_budget(b"")) == b""
    for position in range(len(content)):
        spoiled = bytearray(content)
        spoiled[position] ^= 1
        assert layout.decode_budget(bytes(spoiled)) is None
        assert layout.decode_budget(content[:position]) is None
    assert layout.decode_budget(content + b"x") is None
