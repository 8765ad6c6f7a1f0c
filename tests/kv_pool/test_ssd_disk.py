"""Written blocks come back as they were, also after a restart; a directory that is not ours stays untouched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash

from kv_pool.ssd.disk import files as files_module
from kv_pool.ssd.disk.filesystem import FileSystem
from kv_pool.ssd.records import PAGE, BatchWritten, DiskDown, SsdFormatError, batch_bytes
from tests.kv_pool.ssd_scene import FaultyFileSystem, Filling, Scene, key_of, payload_of

LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 4 * PAGE)


def test_blocks_of_any_length_come_back_and_bytes_are_counted(tmp_path: Path):
    scene = Scene(str(tmp_path / "ssd"))
    up = scene.start()
    assert up.segments == ()
    assert up.budget is None
    filling = Filling(0, 1)
    batch, written = scene.batch(filling, [(key_of(i), length) for i, length in enumerate(LENGTHS)])
    scene.disk.write(batch)
    answer = scene.wait_for(BatchWritten)
    assert answer == BatchWritten(batch.id, True, batch_bytes(batch))
    more, written_later = scene.batch(filling, [(key_of(100), 2 * PAGE)], seal=True)
    scene.disk.write(more)
    assert scene.wait_for(BatchWritten) == BatchWritten(more.id, True, batch_bytes(more))
    assert all(scene.reads_right(block) for block in written + written_later)
    scene.stop()
    assert scene.disk.stats()["ssd_bytes_written"] == batch_bytes(batch) + batch_bytes(more)


def test_a_read_of_what_was_never_there_is_a_miss(tmp_path: Path):
    scene = Scene(str(tmp_path))
    scene.start()
    _, [first, second] = scene.write(Filling(0, 1), [(key_of(1), PAGE), (key_of(2), PAGE)])
    for key, place in ((second.key, first.place), (first.key, second.place)):
        assert scene.read(key, place).fault == "corrupt"
    assert scene.disk.stats()["ssd_corrupt"] == 2
    assert scene.reads_right(first)
    scene.stop()


def test_padding_on_the_medium_is_zero_whatever_the_slot_holds(tmp_path: Path):
    scene = Scene(str(tmp_path))
    scene.start()
    scene.arena.slot(0)[:] = b"x" * scene.arena.slot_bytes
    scene.write(Filling(0, 1), [(key_of(1), PAGE + 10)])
    scene.stop()
    content = (tmp_path / "segment-000000.kv").read_bytes()
    assert content[2 * PAGE : 3 * PAGE + 10] == payload_of(key_of(1), PAGE + 10)
    assert content[3 * PAGE + 10 : 4 * PAGE] == bytes(PAGE - 10)


def test_everything_written_is_there_after_a_restart_sealed_or_not(tmp_path: Path):
    scene = Scene(str(tmp_path))
    first_up = scene.start()
    sealed, unsealed = Filling(0, 7), Filling(2, 3)
    _, a = scene.write(sealed, [(key_of(1), PAGE), (key_of(2), 10)])
    _, b = scene.write(sealed, [(key_of(3), 2 * PAGE)], seal=True)
    _, c = scene.write(unsealed, [(key_of(4), PAGE), (key_of(5), 3 * PAGE)])
    scene.disk.save_budget(b"old")
    scene.disk.save_budget(b"newer")
    scene.disk.save_budget(b"newest")
    scene.stop()
    scene = Scene(str(tmp_path))
    up = scene.start()
    assert (up.store, up.budget) == (first_up.store, b"newest")
    full, half = up.segments
    assert (full.id, full.generation, full.retention, full.sealed) == (0, 7, 1, True)
    assert full.entries == tuple(sealed.entries)
    assert (half.id, half.generation, half.retention, half.sealed, half.used_pages) == (2, 3, 1, False, unsealed.page)
    assert half.entries == tuple(unsealed.entries)
    assert all(scene.reads_right(block) for block in a + b + c)
    scene.stop()


def test_a_reused_segment_forgets_its_earlier_generation(tmp_path: Path):
    scene = Scene(str(tmp_path))
    scene.start()
    _, old = scene.write(Filling(0, 1), [(key_of(i), PAGE) for i in range(6)], seal=True)
    _, new = scene.write(Filling(0, 2), [(key_of(10 + i), PAGE) for i in range(2)])
    assert not any(scene.reads_right(block) for block in old[: len(new)]), "overwritten"
    assert all(scene.reads_right(block) for block in new)
    scene.stop()
    scene = Scene(str(tmp_path))
    [found] = scene.start().segments
    assert (found.generation, found.sealed) == (2, False)
    assert [entry.key for entry in found.entries] == [block.key for block in new]
    scene.stop()


def test_batches_are_acknowledged_in_their_order(tmp_path: Path):
    scene = Scene(str(tmp_path), threads=4, slots=32)
    scene.start()
    fillings = [Filling(i, 1) for i in range(3)]
    ids = []
    for i in range(30):
        batch, _ = scene.batch(fillings[i % 3], [(key_of(i), PAGE)], slot=i)
        scene.disk.write(batch)
        ids.append(batch.id)
    assert [scene.wait_for(BatchWritten).id for _ in ids] == ids
    scene.stop()


def test_a_batch_that_contradicts_itself_is_refused_and_harms_nobody(tmp_path: Path):
    scene = Scene(str(tmp_path))
    scene.start()
    filling = Filling(0, 1)
    _, good = scene.write(filling, [(key_of(1), PAGE)])
    filling.page = 63
    assert not scene.write(filling, [(key_of(2), PAGE)])[0].ok
    assert scene.disk.healthy
    assert all(scene.reads_right(block) for block in good)
    scene.stop()


def test_only_so_many_jobs_are_taken(tmp_path: Path):
    faulty = FaultyFileSystem()
    scene = Scene(str(tmp_path), filesystem=faulty, jobs_max=2, threads=1)
    scene.start()
    faulty.fail("pwritev", error="hang", times=1)
    filling = Filling(0, 1)
    batches = [scene.batch(filling, [(key_of(i), PAGE)], slot=i)[0] for i in range(3)]
    for batch in batches:
        scene.disk.write(batch)
    assert scene.disk.room == 0
    assert scene.wait_for(BatchWritten) == BatchWritten(batches[2].id, False, 0)
    faulty.release()
    assert [scene.wait_for(BatchWritten).ok for _ in range(2)] == [True, True]
    scene.stop()


def test_a_filesystem_without_direct_access_is_used_through_the_page_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Refusing(FileSystem):
        def open(self, name: str, flags: int, dir_fd: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "no O_DIRECT here")
            return super().open(name, flags, dir_fd)

    for _ in range(2):
        scene = Scene(str(tmp_path), filesystem=Refusing())
        scene.start()
        _, written = scene.write(Filling(0, 1), [(key_of(1), PAGE + 1)])
        assert all(scene.reads_right(block) for block in written)
        scene.stop()
    assert [record.message.count("O_DIRECT") for record in caplog.records if "O_DIRECT" in record.message] == [1, 1]


def test_more_segments_than_may_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files_module, "OPEN_FILES_MAX", 2)
    scene = Scene(str(tmp_path), segments=8)
    scene.start()
    before = len(os.listdir("/proc/self/fd"))
    written = [scene.write(Filling(i, 1), [(key_of(i), PAGE)])[1][0] for i in range(8)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert all(scene.reads_right(block) for block in written)
    scene.stop()


def test_files_are_for_their_owner_alone_and_what_a_crash_left_is_removed(tmp_path: Path):
    directory = tmp_path / "deep" / "ssd"
    scene = Scene(str(directory))
    scene.start()
    scene.write(Filling(0, 1), [(key_of(1), PAGE)])
    scene.disk.save_budget(b"budget")
    scene.stop()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == dict.fromkeys(
        ("FORMAT", "LOCK", "BUDGET", "segment-000000.kv"), 0o600
    )
    (directory / "BUDGET.tmp").write_bytes(b"half")
    (directory / "notes").write_bytes(b"somebody's")
    scene = Scene(str(directory))
    assert scene.start().budget == b"budget"
    scene.stop()
    assert not (directory / "BUDGET.tmp").exists()
    assert (directory / "notes").read_bytes() == b"somebody's"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "FORMAT").write_text(json.dumps(json.loads((d / "FORMAT").read_text()) | {"version": 99})), "version 99"),
        (lambda d: (d / "FORMAT").write_text("{"), "another directory"),
        (lambda d: (d / "FORMAT").unlink(), "no FORMAT"),
    ],
)
def test_a_directory_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path, change, message: str):
    scene = Scene(str(tmp_path))
    scene.start()
    scene.write(Filling(0, 1), [(key_of(1), PAGE)])
    scene.stop()
    change(tmp_path)
    before = {path.name: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in tmp_path.iterdir()}
    with pytest.raises(SsdFormatError, match=message):
        Scene(str(tmp_path)).start()
    assert {path.name: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in tmp_path.iterdir()} == before


def test_other_sizes_are_refused_more_segments_are_taken(tmp_path: Path):
    scene = Scene(str(tmp_path), segments=4)
    scene.start()
    _, written = scene.write(Filling(3, 1), [(key_of(1), PAGE)])
    scene.stop()
    for sizes in ({"segments": 3}, {"segment_bytes": 128 * PAGE}):
        with pytest.raises(SsdFormatError, match="set these sizes back"):
            Scene(str(tmp_path), **sizes).start()
    for segments in (6, 6):
        scene = Scene(str(tmp_path), segments=segments)
        assert len(scene.start().segments) == 1
        assert scene.reads_right(written[0])
        scene.stop()


def test_one_directory_has_one_user_and_the_next_gets_it_when_that_ends(tmp_path: Path):
    first, second = Scene(str(tmp_path)), Scene(str(tmp_path))
    first.start()
    _, written = first.write(Filling(0, 1), [(key_of(1), PAGE)])
    second.disk.start()
    assert second.wait_for(DiskDown) == DiskDown("in use by another process")
    assert not second.disk.healthy
    assert not second.reads_right(written[0])
    first.stop()
    second.wait_until(lambda: second.disk.healthy)
    assert second.reads_right(written[0])
    second.stop()
    assert second.disk.stats()["ssd_downs"] == 1


def test_the_lock_is_free_after_a_stop_and_no_thread_or_file_is_left(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        scene = Scene(str(tmp_path))
        scene.start()
        scene.write(Filling(0, 1), [(key_of(1), PAGE)])
        scene.stop()
    assert len(os.listdir("/proc/self/fd")) == before
