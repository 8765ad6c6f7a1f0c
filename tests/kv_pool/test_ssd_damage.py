"""Whatever happens to the files: a read gives the right bytes or a miss, and a restart finds all that is sound."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_pool.ssd.records import PAGE, BatchWritten, DiskDown, DiskUp, Place, record_pages
from tests.kv_pool.ssd_scene import FaultyFileSystem, Filling, Scene, Written, key_of

FILE = "segment-000000.kv"
SEGMENT_PAGES = 32
LENGTHS = (PAGE, 100, 3 * PAGE, 2 * PAGE + 1, PAGE, 4 * PAGE)
GIVEN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Damaged:
    """A segment with known blocks; its file can be spoiled and read, live or after a restart."""

    def __init__(self, directory: Path, *, sealed: bool) -> None:
        self.directory = directory
        self.path = directory / FILE
        scene = self.make()
        scene.start()
        filling = Filling(0, 5)
        self.written: list[Written] = []
        for i in range(0, len(LENGTHS), 2):
            blocks = [(key_of(j), LENGTHS[j]) for j in (i, i + 1)]
            answer, written = scene.write(filling, blocks, seal=sealed and i + 2 == len(LENGTHS))
            assert answer.ok
            self.written += written
        self.used_pages = filling.page
        scene.stop()
        self.sound = self.path.read_bytes()
        assert len(self.sound) == SEGMENT_PAGES * PAGE

    def make(self, **options: object) -> Scene:
        return Scene(str(self.directory), segments=2, segment_bytes=SEGMENT_PAGES * PAGE, **options)  # type: ignore[arg-type]

    def owner(self, offset: int) -> Written | None:
        """Whose header or payload that byte belongs to; None for the rest, padding too."""
        for block in self.written:
            start = block.place.page * PAGE
            if start <= offset < start + PAGE + block.place.length:
                return block
        return None

    def entries_found(self, up: DiskUp) -> set[int]:
        return {entry.page for segment in up.segments for entry in segment.entries}


@pytest.fixture(scope="module", params=[True, False], ids=["sealed", "unsealed"])
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(tmp_path_factory.mktemp("ssd"), sealed=request.param)


@pytest.fixture(scope="module")
def live(damaged: Damaged) -> Iterator[Scene]:
    """A disk that was opened before any damage."""
    directory = damaged.directory.parent / "live"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(damaged.directory, directory)
    scene = Scene(str(directory), segments=2, segment_bytes=SEGMENT_PAGES * PAGE)
    scene.start()
    yield scene
    scene.stop()
    shutil.rmtree(directory)


def spoil(path: Path, content: bytes) -> None:
    """In place: whoever has the file open sees it."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate(len(content))


def flipped(content: bytes, offset: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[offset] ^= 1 << bit
    return bytes(changed)


@GIVEN
@given(data=st.data(), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_its_record_and_no_other(damaged: Damaged, live: Scene, data: st.DataObject, bit: int):
    used = damaged.used_pages * PAGE
    offset = data.draw(st.integers(PAGE, used - 1) | st.sampled_from([b.place.page * PAGE for b in damaged.written]), "offset")
    path = Path(live.disk._path) / FILE
    spoil(path, flipped(damaged.sound, offset, bit))
    owner = damaged.owner(offset)
    for block in damaged.written:
        assert live.reads_right(block) == (block is not owner), block
    spoil(path, damaged.sound)


@GIVEN
@given(offset=st.integers(0, SEGMENT_PAGES * PAGE - 1), bit=st.integers(0, 7))
def test_after_a_restart_a_flipped_bit_costs_its_record_and_no_other(damaged: Damaged, offset: int, bit: int):
    spoil(damaged.path, flipped(damaged.sound, offset, bit))
    scene = damaged.make()
    found = damaged.entries_found(scene.start())
    owner = damaged.owner(offset)
    for block in damaged.written:
        assert block.place.page in found or block is owner
        assert scene.reads_right(block) == (block is not owner)
    scene.stop()


@GIVEN
@given(size=st.integers(0, SEGMENT_PAGES * PAGE - 1))
def test_after_a_cut_what_lies_before_it_is_found(damaged: Damaged, size: int):
    spoil(damaged.path, damaged.sound[:size])
    scene = damaged.make()
    found = damaged.entries_found(scene.start())
    for block in damaged.written:
        whole = (block.place.page + record_pages(block.place.length)) * PAGE <= size
        assert (block.place.page in found) == whole
        if whole:
            assert scene.reads_right(block)
    scene.stop()


@GIVEN
@given(a=st.integers(0, len(LENGTHS) - 1), b=st.integers(0, len(LENGTHS) - 1))
def test_records_in_each_others_place_are_not_taken(damaged: Damaged, live: Scene, a: int, b: int):
    first, second = damaged.written[a].place, damaged.written[b].place
    pages = min(record_pages(first.length), record_pages(second.length))
    content = bytearray(damaged.sound)
    for to, source in ((first, second), (second, first)):
        start = source.page * PAGE
        content[to.page * PAGE : (to.page + pages) * PAGE] = damaged.sound[start : start + pages * PAGE]
    path = Path(live.disk._path) / FILE
    spoil(path, bytes(content))
    for i, block in enumerate(damaged.written):
        assert live.reads_right(block) == (a == b or i not in (a, b))
    spoil(path, damaged.sound)


def test_a_cut_under_a_running_node_costs_what_was_cut(tmp_path: Path):
    damaged = Damaged(tmp_path, sealed=False)
    scene = damaged.make()
    scene.start()
    assert scene.reads_right(damaged.written[0])
    third = damaged.written[2].place
    spoil(damaged.path, damaged.sound[: third.page * PAGE + 100])
    assert [scene.reads_right(block) for block in damaged.written[:3]] == [True, True, False]
    assert not scene.reads_right(damaged.written[4])
    assert not scene.reads_right(damaged.written[5])
    scene.wait_for(DiskDown)
    up = scene.wait_for(DiskUp)
    assert damaged.entries_found(up) == {block.place.page for block in damaged.written[:2]}
    scene.stop()


def test_an_old_copy_of_a_segment_is_never_taken_for_the_new_one(tmp_path: Path):
    damaged = Damaged(tmp_path, sealed=True)
    scene = damaged.make()
    scene.start()
    filling = Filling(0, 6)
    _, new = scene.write(filling, [(key_of(100 + i), LENGTHS[i]) for i in range(4)], seal=True)
    assert all(scene.reads_right(block) for block in new)
    spoil(damaged.path, damaged.sound)
    assert not any(scene.reads_right(block) for block in new)
    scene.stop()


def test_a_segment_of_another_store_or_another_number_is_nobodys(tmp_path: Path):
    ours, theirs = Damaged(tmp_path / "ours", sealed=True), Damaged(tmp_path / "theirs", sealed=True)
    spoil(ours.path, theirs.sound)
    (ours.directory / "segment-000001.kv").write_bytes(ours.sound)
    scene = ours.make()
    assert scene.start().segments == ()
    moved = [Written(b.key, Place(1, b.place.generation, b.place.page, b.place.length), b.checksum) for b in ours.written]
    assert not any(scene.reads_right(block) for block in ours.written + moved)
    scene.stop()


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced by a copy"])
def test_a_segment_file_deleted_under_a_running_node(tmp_path: Path, again: bool):
    damaged = Damaged(tmp_path, sealed=False)
    scene = damaged.make()
    scene.start()
    assert scene.reads_right(damaged.written[0])
    damaged.path.unlink()
    if again:
        damaged.path.write_bytes(damaged.sound)
    answer = scene.read(damaged.written[0].key, damaged.written[0].place)
    assert (answer.record, answer.fault) == (None, "io")
    assert scene.wait_for(DiskDown) == DiskDown("gone")
    up = scene.wait_for(DiskUp)
    assert len(damaged.entries_found(up)) == (len(damaged.written) if again else 0)
    answer, written = scene.write(Filling(0, 9), [(key_of(50), PAGE)])
    assert answer.ok
    assert scene.reads_right(written[0])
    scene.stop()


def test_a_write_into_a_deleted_file_is_not_acknowledged(tmp_path: Path):
    scene = Scene(str(tmp_path))
    scene.start()
    filling = Filling(0, 1)
    assert scene.write(filling, [(key_of(1), PAGE)])[0].ok
    (tmp_path / FILE).unlink()
    assert not scene.write(filling, [(key_of(2), PAGE)])[0].ok
    assert scene.wait_for(DiskDown) == DiskDown("gone")
    scene.wait_for(DiskUp)
    scene.stop()


def test_an_unsound_header_page_of_the_segment_costs_nothing(tmp_path: Path):
    for sealed in (True, False):
        damaged = Damaged(tmp_path / str(sealed), sealed=sealed)
        spoil(damaged.path, bytes(PAGE) + damaged.sound[PAGE:])
        scene = damaged.make()
        [found] = scene.start().segments
        assert (found.generation, found.retention, found.sealed) == (5, 1, True)
        assert len(found.entries) == len(LENGTHS)
        assert all(scene.reads_right(block) for block in damaged.written)
        scene.stop()


@pytest.mark.parametrize("seed", range(12))
def test_a_torn_write_is_never_acknowledged_nor_does_it_harm_what_was(tmp_path: Path, seed: int):
    faulty = FaultyFileSystem(seed)
    scene = Scene(str(tmp_path), filesystem=faulty)
    scene.start()
    filling = Filling(0, 1)
    _, before = scene.write(filling, [(key_of(i), (i % 4 + 1) * PAGE) for i in range(4)])
    faulty.fail("pwritev", error="torn", times=1)
    batch, torn = scene.batch(filling, [(key_of(10 + i), (i % 4 + 1) * PAGE) for i in range(4)], seal=True)
    scene.disk.write(batch)
    assert not scene.wait_for(BatchWritten, batch.id).ok
    assert scene.wait_for(DiskDown) == DiskDown("input/output error")
    [found] = scene.wait_for(DiskUp).segments
    keys = [entry.key for entry in found.entries]
    assert keys[: len(before)] == [block.key for block in before]
    assert not found.sealed
    assert all(scene.reads_right(block) for block in before)
    for block in torn:  # right bytes or none: the scene sees to that
        scene.reads_right(block)
    scene.stop()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_transfer_that_comes_in_parts_is_carried_on_with(tmp_path: Path, call: str):
    faulty = FaultyFileSystem(seed=3)
    scene = Scene(str(tmp_path), filesystem=faulty)
    scene.start()
    filling = Filling(0, 1)
    scene.write(filling, [(key_of(0), PAGE)])
    faulty.random.randrange = lambda *_: 2 * PAGE  # type: ignore[method-assign]
    faulty.fail(call, error="short", times=1)
    answer, written = scene.write(filling, [(key_of(i), 3 * PAGE) for i in range(1, 4)])
    assert answer.ok
    assert all(scene.reads_right(block) for block in written)
    assert not any(fault.times for fault in faulty.faults), "it was not met"
    scene.stop()
