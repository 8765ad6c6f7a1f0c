"""A scheduler's journal gives back what went in, and a replay gives the same plans, byte for byte."""

from __future__ import annotations

import io
import os
import random
import threading
from pathlib import Path
from typing import BinaryIO

import msgpack
import pytest
from scheduler_scene import Scene, keys_of, small_cluster
from test_scheduler_random import random_step

from cluster.simulator.replay import JournalError, replay_journal
from scheduler.journal import Row, head, pack, read_journal, row
from scheduler.journal_file import JournalFile
from scheduler.messages import Reply, RequestEnded, Tick, WorkerReport
from scheduler.plan import RouteRequest, SchedulerSettings
from scheduler.state import SchedulerState


class Recorded:
    """Stands in a scene's place for its state, and notes all that goes through."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.rows = [head(state.settings, "shortest")]

    def handle(self, event, now):  # type: ignore[no-untyped-def]
        actions = self._state.handle(event, now)
        self.rows.append(row(now, event, actions))
        return actions

    def route(self, request, now):  # type: ignore[no-untyped-def]
        answer = self._state.route(request, now)
        self.rows.append(row(now, request, answer))
        return answer

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._state, name)


def recorded_run(seed: int, settings: SchedulerSettings) -> bytes:
    """Everything that can happen, on a small cluster."""
    scene = small_cluster(nodes=2, prefill=2, decode=2)
    scene.state = Recorded(SchedulerState(settings))  # type: ignore[assignment]
    for worker in scene.workers.values():
        worker.fence = 0
    scene.beat(3)
    scene.store("n0", keys_of("doc", 8))
    draw = random.Random(seed)
    for step in range(60):
        random_step(scene, draw, step)
    return b"".join(scene.state.rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["ours", "mooncake", "random", "round_robin", "least_loaded", "local_cache_aware"])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_gives_the_same_plans_byte_for_byte(policy: str, seed: int, tmp_path: Path):
    journal = tmp_path / "journal"
    journal.write_bytes(recorded_run(seed, SchedulerSettings(policy=policy, seed=seed)))  # type: ignore[arg-type]
    report = replay_journal(journal)
    assert report.equal, report
    assert report.plans > 5
    assert report.rows > 100


def test_the_first_difference_is_named(tmp_path: Path):
    journal = tmp_path / "journal"
    data = recorded_run(1, SchedulerSettings())
    rows = list(msgpack.Unpacker(io.BytesIO(data), strict_map_key=False))
    changed = next(i for i, each in enumerate(rows) if i and b"queue_s" in each[2])
    rows[changed][2] = rows[changed][2].replace(b"queue_s", b"queue_x")
    journal.write_bytes(b"".join(msgpack.packb(each) for each in rows))
    report = replay_journal(journal)
    assert not report.equal
    assert report.first_difference == changed + 1
    assert report.recorded != report.replayed


def test_rows_come_back_as_they_were():
    scene = Scene()
    node = scene.node("n0")
    batch = node.stored(keys_of("doc", 3))
    from scheduler.messages import BlocksChanged, SnapshotArrived

    given = [
        node.report(),
        scene.prefill("p0").report(),
        scene.decode("d0").report(),
        BlocksChanged(batch),
        RequestEnded("r", 1, 0.25, 40),
        Tick(),
        RouteRequest("r", 0, keys_of("doc", 2), 130, 10, avoid=("p1",), request_class="chat", slo_ttft_s=1.5),
    ]
    data = head(SchedulerSettings(), "fcfs") + b"".join(row(1.5, each, []) for each in given)
    settings, order, rows = read_journal(io.BytesIO(data))
    assert (settings, order) == (SchedulerSettings(), "fcfs")
    assert list(rows) == [Row(1.5, each, pack([])) for each in given]
    snapshot = row(2.0, SnapshotArrived(node.snapshot()), [])
    (kept,) = list(read_journal(io.BytesIO(head(SchedulerSettings(), "fcfs") + snapshot))[2])
    assert kept.input.snapshot.sequence == node.sequence  # type: ignore[union-attr]
    assert set(kept.input.snapshot.keys_by_medium["dram"]) == set(keys_of("doc", 3))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"nonsense", msgpack.packb(["something else", 1, {}, "fcfs"]), msgpack.packb([1, 2])]
)
def test_what_is_no_journal_is_refused(data: bytes, tmp_path: Path):
    journal = tmp_path / "journal"
    journal.write_bytes(data)
    with pytest.raises(JournalError):
        replay_journal(journal)


@pytest.mark.parametrize(
    "given",
    [RouteRequest("r", 0, (b"x",), 100, 5), WorkerReport("p", "a", "p", "n", 0, None), Reply(1)],  # type: ignore[arg-type]
)
def test_a_row_that_no_scheduler_was_given_is_named(given: object, tmp_path: Path):
    journal = tmp_path / "journal"
    journal.write_bytes(head(SchedulerSettings(), "shortest") + row(1.0, given, []))  # type: ignore[arg-type]
    with pytest.raises(JournalError, match="row 2"):
        replay_journal(journal)


@pytest.mark.parametrize("damaged", [[1.0, msgpack.packb({"Popen": {"args": "id"}}), 5], [1.0, b"\xc1", b""], [1.0], "x"])
def test_a_damaged_row_is_named_and_nothing_strange_is_made_of_it(damaged: object, tmp_path: Path):
    journal = tmp_path / "journal"
    journal.write_bytes(head(SchedulerSettings(), "shortest") + msgpack.packb(damaged))
    with pytest.raises(JournalError, match="row 2"):
        replay_journal(journal)


def test_a_last_row_that_was_cut_is_left_out(tmp_path: Path):
    journal = tmp_path / "journal"
    data = recorded_run(2, SchedulerSettings())
    journal.write_bytes(data[:-3])
    assert replay_journal(journal).equal


def test_the_file_is_the_owners_alone_and_ends_at_its_size(tmp_path: Path):
    path = tmp_path / "journal"
    settings = SchedulerSettings()
    journal = JournalFile(path, settings, "shortest", bytes_max=2000)
    journal.start()
    for i in range(1000):
        journal.note(float(i), Tick(), [])
    journal.stop()
    assert path.stat().st_mode & 0o777 == 0o600
    assert 1900 <= path.stat().st_size <= 2000
    assert journal.view() == {"rows": journal.view()["rows"], "bytes": path.stat().st_size, "ended": "it has its full size"}
    state = SchedulerState(settings)
    with path.open("rb") as stream:
        assert all(state.handle(each.input, each.now) == [] for each in read_journal(stream)[2])  # type: ignore[arg-type]


def test_nothing_is_kept_after_the_end(tmp_path: Path):
    path = tmp_path / "journal"
    journal = JournalFile(path, SchedulerSettings(), "shortest")
    journal.start()
    journal.stop()
    size = path.stat().st_size
    journal.note(1.0, Tick(), [])
    assert path.stat().st_size == size


def test_an_earlier_journal_is_kept_once(tmp_path: Path):
    path = tmp_path / "journal"
    for seed in range(3):
        journal = JournalFile(path, SchedulerSettings(seed=seed), "shortest")
        journal.start()
        journal.stop()
    seeds = {}
    for each in tmp_path.iterdir():
        with each.open("rb") as stream:
            seeds[each.name] = read_journal(stream)[0].seed
    assert seeds == {"journal": 2, "journal.old": 1}


@pytest.mark.parametrize("kind", ["text", "folder", "pipe", "link"])
def test_what_is_no_journal_is_not_overwritten(kind: str, tmp_path: Path):
    path = tmp_path / "journal"
    match kind:
        case "text":
            path.write_text("the only copy of something")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="journal"):
        JournalFile(path, SchedulerSettings(), "shortest").start()
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]


class StuckDisk:
    """A file whose writes wait for ``release``, and then fail if ``broken``."""

    def __init__(self, file: BinaryIO, *, broken: bool = False) -> None:
        self._file = file
        self._broken = broken
        self.entered, self.release = threading.Event(), threading.Event()

    def write(self, data: bytes) -> None:
        self.entered.set()
        assert self.release.wait(10)
        if self._broken:
            raise OSError(5, "Input/output error")
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> StuckDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def on_a_stuck_disk(path: Path, monkeypatch: pytest.MonkeyPatch, *, broken: bool = False) -> tuple[JournalFile, StuckDisk]:
    journal = JournalFile(path, SchedulerSettings(), "shortest", waiting_max=100)
    disks: list[StuckDisk] = []
    real = os.fdopen

    def stuck(descriptor: int, mode: str) -> StuckDisk:
        disks.append(StuckDisk(real(descriptor, mode), broken=broken))  # type: ignore[arg-type]
        return disks[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", stuck)
        journal.start()
    assert disks[0].entered.wait(10)
    return journal, disks[0]


def test_a_disk_that_cannot_keep_up_ends_the_journal_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    journal, disk = on_a_stuck_disk(tmp_path / "journal", monkeypatch)
    for i in range(1000):
        journal.note(float(i), Tick(), [])
    assert journal.view()["ended"] == "the disk cannot keep up"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    disk.release.set()
    journal.stop()
    report = replay_journal(tmp_path / "journal")  # what was taken is whole
    assert report.equal
    assert report.rows == 100


def test_a_disk_that_fails_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal, disk = on_a_stuck_disk(tmp_path / "journal", monkeypatch, broken=True)
    disk.release.set()
    journal._thread.join(10)
    assert journal.view()["ended"] == "Input/output error"
    journal.note(1.0, Tick(), [])
    journal.stop()


def test_a_row_that_cannot_be_packed_ends_the_journal_and_nothing_else(tmp_path: Path):
    journal = JournalFile(tmp_path / "journal", SchedulerSettings(), "shortest")
    journal.start()
    journal.note(1.0, RequestEnded("\ud800", 0), [])
    assert journal.view()["ended"] == "a row could not be packed"
    journal.stop()
    assert replay_journal(tmp_path / "journal").rows == 0
