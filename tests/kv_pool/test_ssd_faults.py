"""A disk that fails, fills up, hangs or goes away: down once, nothing lost in between, and up again by itself."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from kv_pool.ssd.disk.health import RETRY_MAX_S, Health, Phase, reason_of
from kv_pool.ssd.records import PAGE, BatchWritten, DiskDown, DiskUp, ReadRecord, RecordRead
from tests.kv_pool.ssd_scene import DEADLINE_S, FaultyFileSystem, Filling, Scene, key_of


def up_and_written(tmp_path: Path, **options: object) -> tuple[Scene, FaultyFileSystem, Filling, list]:
    faulty = FaultyFileSystem()
    scene = Scene(str(tmp_path / "ssd"), filesystem=faulty, **options)  # type: ignore[arg-type]
    scene.start()
    filling = Filling(0, 1)
    answer, written = scene.write(filling, [(key_of(i), PAGE) for i in range(3)])
    assert answer.ok
    return scene, faulty, filling, written


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        ("pwritev", errno.ENOSPC, "no space"),
        ("pwritev", errno.EIO, "input/output error"),
        ("pwritev", errno.EROFS, "read-only"),
        ("pwritev", errno.EDQUOT, "no space"),
        ("fdatasync", errno.EIO, "input/output error"),
    ],
)
def test_a_write_that_fails_takes_the_disk_down_until_it_works_again(tmp_path: Path, call: str, error: int, reason: str):
    scene, faulty, filling, written = up_and_written(tmp_path)
    faulty.fail(call, error=error)
    faulty.fail("open", error=error, after=0)
    assert not scene.write(filling, [(key_of(10), PAGE)])[0].ok
    assert scene.wait_for(DiskDown) == DiskDown(reason)
    assert not scene.disk.healthy
    assert not scene.write(filling, [(key_of(11), PAGE)])[0].ok
    assert scene.read(written[0].key, written[0].place).fault == "io"
    tries = scene.disk._health.failures
    scene.wait_until(lambda: scene.disk._health.failures > tries)
    faulty.heal()
    [found] = scene.wait_for(DiskUp).segments
    assert [entry.key for entry in found.entries][:3] == [block.key for block in written]
    assert all(scene.reads_right(block) for block in written)
    answer, later = scene.write(Filling(1, 1), [(key_of(12), PAGE)])
    assert answer.ok
    assert scene.reads_right(later[0])
    assert not [event for event in scene.events if isinstance(event, DiskDown | DiskUp)]
    assert scene.disk.stats()["ssd_downs"] == 1
    scene.stop()


def test_a_full_disk_is_up_again_only_when_the_segment_fits(tmp_path: Path):
    scene, faulty, _, written = up_and_written(tmp_path)
    faulty.fail("fallocate", error=errno.ENOSPC)
    assert not scene.write(Filling(1, 1), [(key_of(10), PAGE)])[0].ok
    assert scene.wait_for(DiskDown) == DiskDown("no space")
    before = faulty.calls.count("fallocate")
    scene.wait_until(lambda: faulty.calls.count("fallocate") >= before + 2)
    assert not scene.disk.healthy
    faulty.heal()
    scene.wait_for(DiskUp)
    assert scene.write(Filling(1, 1), [(key_of(10), PAGE)])[0].ok
    assert all(scene.reads_right(block) for block in written)
    scene.stop()


def test_one_bad_place_costs_one_read_three_in_a_row_the_disk(tmp_path: Path):
    scene, faulty, _, written = up_and_written(tmp_path)
    for _ in range(4):
        faulty.fail("preadv", error=errno.EIO, times=2)
        assert [scene.read(b.key, b.place).fault for b in written] == ["io", "io", None]
    assert scene.disk.healthy
    faulty.fail("preadv", error=errno.EIO, times=3)
    assert [scene.read(b.key, b.place).fault for b in written] == ["io"] * 3
    assert scene.wait_for(DiskDown) == DiskDown("input/output error")
    scene.wait_for(DiskUp)
    assert all(scene.reads_right(block) for block in written)
    scene.stop()


def test_a_start_on_a_broken_disk_is_down_and_then_up(tmp_path: Path):
    faulty = FaultyFileSystem()
    faulty.fail("open", error=errno.EROFS, times=3)
    scene = Scene(str(tmp_path), filesystem=faulty)
    scene.disk.start()
    assert scene.wait_for(DiskDown) == DiskDown("read-only")
    scene.wait_for(DiskUp)
    assert not [event for event in scene.events if isinstance(event, DiskDown)]
    scene.stop()


def test_segments_that_stay_unreadable_are_given_up_the_others_are_not(tmp_path: Path):
    scene, _, _, written = up_and_written(tmp_path)
    _, others = scene.write(Filling(1, 4), [(key_of(20), PAGE)], seal=True)
    scene.stop()

    class OneBad(FaultyFileSystem):
        def open(self, name: str, flags: int, dir_fd: int) -> int:
            if name == "segment-000000.kv":
                raise OSError(errno.EIO, "injected")
            return super().open(name, flags, dir_fd)

    scene = Scene(str(tmp_path / "ssd"), filesystem=OneBad())
    scene.disk.start()
    assert scene.wait_for(DiskDown) == DiskDown("input/output error")
    bad, good = scene.wait_for(DiskUp).segments
    assert (bad.id, bad.entries, bad.sealed) == (0, (), True)
    assert bad.generation > 4
    assert [entry.key for entry in good.entries] == [others[0].key]
    assert scene.reads_right(others[0])
    assert written
    scene.stop()


@pytest.mark.parametrize("remade", ["by itself", "by somebody"])
def test_a_directory_that_is_removed_is_noticed_and_made_anew(tmp_path: Path, remade: str):
    scene, _, _, _ = up_and_written(tmp_path)
    directory = tmp_path / "ssd"
    shutil.rmtree(directory)
    if remade == "by somebody":
        directory.mkdir()
    assert scene.wait_for(DiskDown) == DiskDown("gone")
    assert scene.wait_for(DiskUp).segments == ()
    answer, written = scene.write(Filling(0, 1), [(key_of(1), PAGE)])
    assert answer.ok
    assert scene.reads_right(written[0])
    assert (directory / "segment-000000.kv").exists()
    scene.stop()


def test_a_directory_on_another_filesystem_is_not_filled(tmp_path: Path):
    """What a mount point looks like when its disk is not mounted."""

    class Unmounted(FaultyFileSystem):
        away = False

        def fstat(self, fd: int):
            found = super().fstat(fd)
            return _on_device(found, 12345) if self.away else found

        def stat(self, path: str):
            found = super().stat(path)
            return _on_device(found, 12345) if self.away else found

    faulty = Unmounted()
    directory = tmp_path / "ssd"
    scene = Scene(str(directory), filesystem=faulty)
    scene.start()
    _, written = scene.write(Filling(0, 1), [(key_of(1), PAGE)])
    kept = directory.rename(tmp_path / "kept")
    directory.mkdir()
    faulty.away = True
    assert scene.wait_for(DiskDown) == DiskDown("gone")
    scene.wait_until(lambda: scene.disk._health.failures > 2)
    assert list(directory.iterdir()) == []
    directory.rmdir()
    kept.rename(directory)
    faulty.away = False
    scene.wait_for(DiskUp)
    assert scene.reads_right(written[0])
    scene.stop()


class Stat:
    def __init__(self, found, device: int) -> None:
        self._found, self.st_dev = found, device

    def __getattr__(self, name: str):
        return getattr(self._found, name)


def _on_device(found, device: int):
    return Stat(found, device)


def test_a_hanging_read_keeps_its_slot_and_the_disk_stays_down_until_it_is_back(tmp_path: Path):
    scene, faulty, filling, written = up_and_written(tmp_path, hang_s=0.1)
    faulty.fail("preadv", error="hang", times=1)
    scene.disk.read(ReadRecord(900, written[0].place, written[0].key, 5))
    assert faulty.hanging.acquire(timeout=DEADLINE_S)
    batch, _ = scene.batch(filling, [(key_of(10), PAGE)])
    assert scene.wait_for(DiskDown) == DiskDown("hung")
    scene.disk.write(batch)
    assert not scene.wait_for(BatchWritten, batch.id).ok
    opens = faulty.calls.count("open")
    now = scene.disk._clock()
    for later in range(1, 200):  # long past every retry
        scene.disk.tick(now + later)
    scene.events += scene.disk.take()
    assert not [event for event in scene.events if isinstance(event, RecordRead | DiskUp)]
    assert faulty.calls.count("open") == opens
    assert scene.disk._health.phase is Phase.DRAINING
    faulty.release()
    scene.wait_for(RecordRead, 900)
    scene.wait_for(DiskUp)
    assert all(scene.reads_right(block) for block in written)
    scene.stop()


def test_what_waits_behind_a_hanging_write_is_answered_at_once_what_hangs_later(tmp_path: Path):
    scene, faulty, filling, written = up_and_written(tmp_path, hang_s=0.1, threads=1)
    faulty.fail("pwritev", error="hang", times=1)
    hanging, [late] = scene.batch(filling, [(key_of(10), PAGE)], slot=4)
    scene.disk.write(hanging)
    assert faulty.hanging.acquire(timeout=DEADLINE_S)
    waiting, _ = scene.batch(filling, [(key_of(11), PAGE)], slot=5)
    scene.disk.write(waiting)
    scene.disk.read(ReadRecord(901, written[0].place, written[0].key, 6))
    assert scene.wait_for(DiskDown) == DiskDown("hung")
    assert scene.wait_for(BatchWritten, waiting.id) == BatchWritten(waiting.id, False, 0)
    assert scene.wait_for(RecordRead, 901).fault == "io"
    assert not [event for event in scene.events if isinstance(event, BatchWritten)]
    faulty.release()
    answer = scene.wait_for(BatchWritten, hanging.id)
    assert not answer.ok
    assert answer.bytes_written == 2 * PAGE, "what went to the medium wears it, acknowledged or not"
    [found] = scene.wait_for(DiskUp).segments
    assert [entry.key for entry in found.entries] == [block.key for block in [*written, late]]
    assert scene.reads_right(late), "the late write was over before the recovery looked"
    scene.stop()


def test_a_footer_waits_for_all_before_it_and_is_forgotten_when_the_disk_hangs(tmp_path: Path):
    scene, faulty, filling, written = up_and_written(tmp_path, hang_s=0.2, threads=4)
    faulty.fail("pwritev", error="hang", times=1)
    hanging, _ = scene.batch(filling, [(key_of(10), PAGE)], slot=4)
    scene.disk.write(hanging)
    assert faulty.hanging.acquire(timeout=DEADLINE_S)
    sealing, [sealed] = scene.batch(filling, [(key_of(11), PAGE)], slot=5, seal=True)
    scene.disk.write(sealing)
    assert scene.wait_for(DiskDown) == DiskDown("hung")
    assert scene.wait_for(BatchWritten, sealing.id) == BatchWritten(sealing.id, False, 2 * PAGE), "its record, not its footer"
    faulty.release()
    assert not scene.wait_for(BatchWritten, hanging.id).ok
    [found] = scene.wait_for(DiskUp).segments
    assert not found.sealed
    assert all(scene.reads_right(block) for block in [*written, sealed])
    scene.stop()


def test_a_disk_that_hangs_while_it_is_opened_does_not_hold_the_start(tmp_path: Path):
    faulty = FaultyFileSystem()
    faulty.fail("listdir", error="hang", times=1)
    scene = Scene(str(tmp_path), filesystem=faulty, hang_s=0.1)
    scene.disk.start()
    assert scene.wait_for(DiskDown) == DiskDown("hung")
    faulty.release()
    scene.wait_for(DiskUp)
    scene.stop()


def test_stop_does_not_wait_for_a_thread_that_hangs_and_the_lock_outlives_it(tmp_path: Path):
    scene, faulty, _, written = up_and_written(tmp_path)
    faulty.fail("preadv", error="hang", times=1)
    scene.disk.read(ReadRecord(900, written[0].place, written[0].key, 5))
    assert faulty.hanging.acquire(timeout=DEADLINE_S)
    assert not scene.disk.stop(0.05)
    assert not [event for event in scene.disk.take() if isinstance(event, RecordRead)]
    other = Scene(str(tmp_path / "ssd"))
    other.disk.start()
    assert other.wait_for(DiskDown) == DiskDown("in use by another process")
    faulty.release()
    other.wait_for(DiskUp)
    assert all(other.reads_right(block) for block in written)
    other.stop()


def test_stop_finishes_what_was_asked(tmp_path: Path):
    scene, _, _, _ = up_and_written(tmp_path)
    filling = Filling(1, 1)
    batches = [scene.batch(filling, [(key_of(20 + i), PAGE)], slot=i)[0] for i in range(5)]
    for batch in batches:
        scene.disk.write(batch)
    scene.disk.save_budget(b"last words")
    scene.stop()
    answers = [event for event in scene.disk.take() if isinstance(event, BatchWritten)]
    assert [(answer.id, answer.ok) for answer in answers] == [(batch.id, True) for batch in batches]
    scene = Scene(str(tmp_path / "ssd"))
    up = scene.start()
    assert up.budget == b"last words"
    assert len(up.segments[1].entries) == 5
    scene.stop()


@pytest.mark.parametrize("call", ["replace", "pwritev", "fdatasync"])
def test_a_budget_that_cannot_be_saved_leaves_the_one_before(tmp_path: Path, call: str):
    scene, faulty, _, _ = up_and_written(tmp_path)
    scene.disk.save_budget(b"first")
    scene.wait_until(lambda: not scene.disk._budget_saving)
    faulty.fail(call, error=errno.EIO, times=1)
    scene.disk.save_budget(b"second")
    assert scene.wait_for(DiskDown) == DiskDown("input/output error")
    assert scene.wait_for(DiskUp).budget == b"first"
    scene.stop()


def test_a_damaged_budget_is_none(tmp_path: Path):
    scene, _, _, _ = up_and_written(tmp_path)
    scene.disk.save_budget(b"some budget")
    scene.stop()
    path = tmp_path / "ssd" / "BUDGET"
    content = bytearray(path.read_bytes())
    for offset in range(len(content)):
        path.write_bytes(bytes(content[:offset]) + bytes([content[offset] ^ 1]) + bytes(content[offset + 1 :]))
        if offset % 8 == 0:
            scene = Scene(str(tmp_path / "ssd"))
            assert scene.start().budget is None
            scene.stop()


# --- the state itself -------------------------------------------------------------------------------------------------------


def test_the_wait_doubles_up_to_its_bound_and_starts_anew_after_a_good_time():
    health = Health(hang_s=1.0, retry_s=1.0)
    now, waits = 0.0, []
    for _ in range(9):
        health.opening()
        health.failed("no space", now)
        health.drained()
        waits.append(health.wait_s())
        assert not health.due(now + health.wait_s() - 0.01)
        now += health.wait_s()
        assert health.due(now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert health.downs == 1
    health.opening()
    health.opened(now)
    health.failed("hung", now + 1)
    assert health.wait_s() == RETRY_MAX_S, "it was not up for long"
    health.drained()
    health.opening()
    health.opened(now)
    health.failed("hung", now + RETRY_MAX_S)
    assert health.wait_s() == 1.0
    assert health.downs == 3


def test_a_disk_is_not_opened_while_a_thread_may_still_write():
    health = Health(hang_s=1.0, retry_s=1.0)
    health.opening()
    health.opened(0.0)
    assert not health.hangs(None, 100.0)
    assert not health.hangs(99.0, 100.0)
    assert health.hangs(98.9, 100.0)
    health.failed("hung", 100.0)
    assert not health.due(1000.0)
    with pytest.raises(RuntimeError):
        health.opening()
    health.drained()
    assert health.due(1000.0)


def test_reasons_are_words():
    assert reason_of(OSError(errno.EIO, "x", "/some/path")) == "input/output error"
    assert reason_of(OSError(errno.EINVAL, "x", "/some/path")) == "invalid argument"
    assert reason_of(OSError("no number")) == "input/output error"
