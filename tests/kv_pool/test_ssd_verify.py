"""The offline check names every damaged record and no other, and leaves everything as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_pool.keys import BlockKey
from kv_pool.ssd.disk.directory import DirectoryInUseError
from kv_pool.ssd.records import (
    PAGE,
    BatchWritten,
    Footer,
    FooterEntry,
    Place,
    Record,
    SsdFormatError,
    WriteBatch,
    WriteRecord,
    record_pages,
)
from kv_pool.ssd.verify import BadRecord, Verification, VerifyReport
from tests.kv_pool.ssd_scene import FAR, Filling, Scene, Written, key_of, payload_of

NOW = 1_800_000_000.0
SEGMENT_PAGES = 64
GIVEN = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(directory: Path) -> tuple[list[BadRecord], VerifyReport]:
    with Verification(str(directory), now=NOW) as verification:
        return list(verification.bad_records()), verification.report


class Sound:
    """A sealed segment, and an open one that was used before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        scene = Scene(str(directory), segment_bytes=SEGMENT_PAGES * PAGE)
        scene.start()
        lengths = [PAGE, 100, 3 * PAGE, 2 * PAGE + 1]
        sealed, old, reused = Filling(0, 1), Filling(1, 1), Filling(1, 2)
        self.written: list[Written] = []
        for i in range(4):
            blocks = [(key_of(10 * i + j), length) for j, length in enumerate(lengths)]
            self.written += scene.write(sealed, blocks, seal=i == 3)[1]
        for i in range(4):
            scene.write(old, [(key_of(100 + 10 * i + j), length) for j, length in enumerate(lengths)], seal=i == 3)
        for i in range(2):
            self.written += scene.write(
                reused, [(key_of(200 + 10 * i + j), length + PAGE) for j, length in enumerate(lengths[:3])]
            )[1]
        scene.stop()
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.footer_page = sealed.page

    def owner(self, segment: int, offset: int) -> Written | None:
        for block in self.written:
            start = block.place.page * PAGE
            if block.place.segment == segment and start <= offset < start + PAGE + block.place.length:
                return block
        return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tmp_path_factory.mktemp("ssd"))


def test_nothing_is_wrong_with_what_is_sound_and_nothing_is_changed(sound: Sound):
    bad, report = check(sound.directory)
    assert bad == []
    pages = sum(record_pages(block.place.length) for block in sound.written)
    assert report == VerifyReport(segments=2, good=len(sound.written), bytes_checked=pages * PAGE)
    assert {path.name: path.read_bytes() for path in sound.directory.iterdir()} == sound.files


@GIVEN
@given(segment=st.sampled_from([0, 1]), offset=st.integers(0, SEGMENT_PAGES * PAGE - 1), bit=st.integers(0, 7), data=st.data())
def test_a_flipped_bit_is_found_where_it_is(sound: Sound, segment: int, offset: int, bit: int, data: st.DataObject):
    block = data.draw(st.none() | st.sampled_from([b for b in sound.written if b.place.segment == segment]))
    if block is not None:  # headers are small: aim at them now and then
        offset = block.place.page * PAGE + offset % PAGE
    path = sound.directory / f"segment-{segment:06d}.kv"
    changed = bytearray(sound.files[path.name])
    changed[offset] ^= 1 << bit
    path.write_bytes(changed)
    bad, report = check(sound.directory)
    path.write_bytes(sound.files[path.name])
    owner = sound.owner(segment, offset)
    assert report.good == len(sound.written) - (owner is not None)
    assert report.bad == (owner is not None)
    pages = [(found.segment, found.page) for found in bad]
    if owner is not None:
        assert pages == [(segment, owner.place.page)]
    elif offset < PAGE:
        assert pages == [(segment, 0)]
    elif segment == 0 and (offset // PAGE == SEGMENT_PAGES - 1 or offset // PAGE == sound.footer_page):
        assert pages == [(0, SEGMENT_PAGES - 1)]
    else:  # what no record and no footer owns
        assert pages == []
    assert report.damaged_pages == len(bad) - report.bad


def test_many_damaged_records_are_all_named(sound: Sound, tmp_path: Path):
    directory = tmp_path / "many"
    shutil.copytree(sound.directory, directory)
    chosen = sound.written[1:12:2] + sound.written[16:18] + sound.written[-1:]
    for i, block in enumerate(chosen):
        path = directory / f"segment-{block.place.segment:06d}.kv"
        changed = bytearray(path.read_bytes())
        offset = block.place.page * PAGE + (PAGE if i % 2 else 40)
        changed[offset] ^= 255
        path.write_bytes(changed)
    bad, report = check(directory)
    assert {(found.segment, found.page) for found in bad} == {(b.place.segment, b.place.page) for b in chosen}
    assert (report.bad, report.good) == (len(chosen), len(sound.written) - len(chosen))


def test_a_cut_file_is_named_and_what_is_before_the_cut_counts(sound: Sound, tmp_path: Path):
    directory = tmp_path / "cut"
    shutil.copytree(sound.directory, directory)
    third = sound.written[2].place
    path = directory / "segment-000000.kv"
    path.write_bytes(sound.files[path.name][: (third.page + 2) * PAGE])
    bad, report = check(directory)
    assert [(found.page, found.reason) for found in bad] == [
        (third.page + 2, "the file is shorter than a segment"),
        (third.page, "the file ends within the record"),
    ]
    assert report.good == 2 + sum(block.place.segment == 1 for block in sound.written)


def test_dead_and_expired_records_are_counted_apart(tmp_path: Path):
    scene = Scene(str(tmp_path))
    scene.start()
    blocks: list[tuple[BlockKey, BlockKey | None, bool, float]] = [
        (key_of(1), None, True, FAR),
        (key_of(2), key_of(1), False, FAR),
        (key_of(3), key_of(2), False, NOW),  # expired, and so
        (key_of(4), key_of(3), False, FAR),  # this one is worth nothing
        (key_of(1), None, True, FAR + 1),  # the same key once more
        (key_of(6), key_of(77), True, FAR),  # its parent was not here when it was written
    ]
    records, page = [], 1
    for slot, (key, parent, first, expires) in enumerate(blocks):
        payload = payload_of(key, PAGE)
        scene.arena.slot(slot)[:PAGE] = payload
        record = Record(key, parent, first, 16, PAGE, xxhash.xxh3_64_intdigest(payload), 0, 1000.0, expires, b"")
        records.append(WriteRecord(Place(0, 1, page, PAGE), record, slot))
        page += 2
    # The footer leaves out what the log had dropped by then: no damage.
    entries = tuple(
        FooterEntry(w.record.key, w.record.parent, w.record.first, w.place.page, PAGE, 16, w.record.expires_at)
        for w in records[1:]
    )
    scene.disk.write(WriteBatch(1, 0, 1, True, 0, tuple(records), Footer(page, entries)))
    assert scene.wait_for(BatchWritten).ok
    scene.stop()
    bad, report = check(tmp_path)
    assert bad == []
    assert (report.good, report.dead, report.expired, report.bad) == (3, 2, 1, 0)


def test_a_directory_that_is_open_or_not_ours_is_not_checked(tmp_path: Path):
    scene = Scene(str(tmp_path / "ssd"))
    scene.start()
    with pytest.raises(DirectoryInUseError):
        Verification(str(tmp_path / "ssd"), now=NOW)
    scene.stop()
    with Verification(str(tmp_path / "ssd"), now=NOW) as verification:
        other = Scene(str(tmp_path / "ssd"))
        other.disk.start()
        assert not other.disk.healthy, "nobody writes while it is checked"
        assert list(verification.bad_records()) == []
    other.wait_until(lambda: other.disk.healthy)
    other.stop()
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises((SsdFormatError, OSError)):
            Verification(str(path), now=NOW)
    assert list((tmp_path / "empty").iterdir()) == []
