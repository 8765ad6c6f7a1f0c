"""What a scheduler has learnt outlives it: as first guesses that a few observations outweigh, and never as a reason to fail."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from scheduler_scene import BLOCK_BYTES, Scene, keys_of, small_cluster

from decode_worker.task import DecodeLoad
from engine.serving.step_time import StepTime
from prefill_worker.task import PrefillLoad
from scheduler.journal import pack
from scheduler.messages import NodeLoad, NodeReport, SpeedsRecalled
from scheduler.plan import Plan, RouteRequest
from scheduler.routing.links import LinkSpeeds
from scheduler.routing.load_speed import LoadSpeeds
from scheduler.routing.prefill_speed import PrefillSpeed
from scheduler.speeds import BYTES_MAX, MEMBERS_MAX, Speeds, SpeedsError, from_json, to_json
from scheduler.speeds_file import SpeedsFile, SpeedsKeeper, speeds_file
from scheduler.state import SchedulerState

MODEL = "tiny 0123 float32"
SPEEDS = Speeds(
    {"p0": (2e-3, 4e-7)}, {"p0": (1e-10, 1e-9, 2e-9, 3e-9)}, {"d0": (0.02, 1e-4, 1e-7)}, {"n0": 2e9}, (("n0", "n1", 3e9),)
)  # fmt: skip


def data_of(**changed: Any) -> dict[str, Any]:
    return json.loads(to_json(SPEEDS, MODEL)) | changed


# --- the data -------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read():
    assert from_json(to_json(SPEEDS, MODEL)) == (SPEEDS, MODEL)
    assert from_json(to_json(Speeds(), "")) == (Speeds(), "")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "the whole"),
        (b"\x00\xff", "the whole"),
        (b"[]", "the whole"),
        (b"x" * (BYTES_MAX + 1), "longer"),
        (data_of(version=2), "version"),
        (data_of(version=True), "version"),
        (data_of(model=5), "model"),
        (data_of(surprise=1), "surprise"),
        ({k: v for k, v in data_of().items() if k != "steps"}, "steps"),
        (data_of(prefill={"p0": [0.0, 0.0]}), "prefill.p0.0"),
        (data_of(prefill={"p0": [True, 0.0]}), "prefill.p0.0"),
        (data_of(prefill={"p0": ["2e-3", 0.0]}), "prefill.p0.0"),
        (data_of(prefill={"p0": [2e-3, -1e-7]}), "prefill.p0.1"),
        (data_of(prefill={"p0": [2e-3]}), "prefill.p0"),
        (data_of(prefill={"p0": [math.inf, 0.0]}), "prefill.p0.0"),
        (data_of(prefill={"p0": [math.nan, 0.0]}), "prefill.p0.0"),
        (data_of(prefill={"": [2e-3, 0.0]}), "prefill"),
        (data_of(loads={"p0": [1e-10, 1e-9, 2e-9, 1.0]}), "loads.p0.3"),
        (data_of(steps={"d0": [-0.01, 0.0, 0.0]}), "steps.d0.0"),
        (data_of(senders={"n0": 0}), "senders.n0"),
        (data_of(links=[["n0", "n1"]]), "links.0"),
        (data_of(links=[["n0", "n1", 1e30]]), "links.0.2"),
        (data_of(prefill={f"p{i}": [2e-3, 0.0] for i in range(MEMBERS_MAX + 1)}), "prefill"),
    ],
)
def test_what_cannot_be_is_refused_whole_and_named(data: bytes | dict[str, Any], named: str):
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(SpeedsError, match=named):
        from_json(raw)


def test_an_entry_out_of_bounds_is_left_out_and_costs_the_others_nothing():
    wild = Speeds(
        {"p0": (1e9, 0.0), "p1": (2e-3, 0.0)}, {"p0": (1.0,) * 4}, SPEEDS.steps | {"d1": (math.nan, 0.0, 0.0)}, {"n0": 1.0},
        (("n0", "n1", 1.0), *SPEEDS.links),
    )  # fmt: skip
    assert from_json(to_json(wild, MODEL))[0] == Speeds({"p1": (2e-3, 0.0)}, {}, SPEEDS.steps, {}, SPEEDS.links)


# --- the file -------------------------------------------------------------------------------------------------------------


def test_the_file_is_the_owners_alone_and_written_whole(tmp_path: Path):
    path = tmp_path / "deep" / "speeds.json"
    file = SpeedsFile(path, MODEL)
    assert file.load() is None
    file.save(Speeds())
    file.save(SPEEDS)
    assert file.load() == SPEEDS
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["speeds.json"]


def test_speeds_of_another_model_are_not_taken(tmp_path: Path):
    SpeedsFile(tmp_path / "speeds", MODEL).save(SPEEDS)
    other = SpeedsFile(tmp_path / "speeds", "another model")
    assert other.load() is None
    other.save(Speeds())
    assert other.load() == Speeds()


@pytest.mark.parametrize("data", [b"", b'{"version": 1', b"\x00" * 100])
def test_a_damaged_file_costs_a_line_and_is_put_aside(data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "speeds"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert SpeedsFile(path, MODEL).load() is None
    assert len(caplog.records) == 1
    assert not path.exists()
    assert (tmp_path / "speeds.refused").read_bytes() == data


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_plain_file_is_neither_read_nor_replaced(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "speeds"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    file = SpeedsFile(path, MODEL)
    with caplog.at_level(logging.WARNING):
        assert file.load() is None
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="not a plain file"):
        file.save(SPEEDS)
    assert [each.name for each in tmp_path.iterdir()] == ["speeds"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = SpeedsFile(tmp_path / "speeds", MODEL)
    file.save(SPEEDS)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.save(Speeds())
    assert file.load() == SPEEDS
    assert [each.name for each in tmp_path.iterdir()] == ["speeds"]


def test_which_file_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert speeds_file("", MODEL) is None
    assert speeds_file("auto", "") is None
    named = speeds_file(str(tmp_path / "mine"), "")
    assert named is not None
    assert named.path == tmp_path / "mine"
    one, again, other = (speeds_file("auto", model) for model in (MODEL, MODEL, "another"))
    assert one is not None
    assert again is not None
    assert other is not None
    assert one.path == again.path != other.path
    assert tmp_path in one.path.parents


# --- the thread -----------------------------------------------------------------------------------------------------------


class Watched(SpeedsFile):
    """Tells of each save; fails while ``broken``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MODEL)
        self.saves: list[Speeds] = []
        self.tries = threading.Semaphore(0)
        self.broken = False

    def save(self, speeds: Speeds) -> None:
        self.tries.release()
        if self.broken:
            raise PermissionError(13, "Permission denied", f"/somewhere/{len(self.saves)}")
        super().save(speeds)
        self.saves.append(speeds)


def test_it_saves_what_changed_now_and_then_and_at_the_end(tmp_path: Path):
    file, learnt = Watched(tmp_path / "speeds"), [Speeds({"p0": (1e-3, 0.0)})]
    asked = threading.Semaphore(0)

    def give() -> Speeds:
        asked.release()
        return learnt[0]

    keeper = SpeedsKeeper(file, give, period_s=0.005)
    keeper.start()
    assert file.tries.acquire(timeout=5)
    for _ in range(5):
        assert asked.acquire(timeout=5)
    keeper.stop()
    assert file.saves == [learnt[0]]  # once: nothing changed
    keeper = SpeedsKeeper(file, lambda: SPEEDS, period_s=3600.0)
    keeper.start()
    keeper.stop()
    assert file.load() == SPEEDS


def test_what_cannot_be_kept_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = Watched(tmp_path / "speeds")
    file.broken = True
    with caplog.at_level(logging.WARNING):
        keeper = SpeedsKeeper(file, lambda: SPEEDS, period_s=0.002)
        keeper.start()
        for _ in range(5):
            assert file.tries.acquire(timeout=5)
        keeper.stop()
    assert len(caplog.records) == 1
    assert not file.saves


# --- what it is worth -----------------------------------------------------------------------------------------------------


def test_a_recalled_line_is_the_guess_exactly():
    speed = PrefillSpeed(400.0)
    speed.recall(2e-3, 4e-7)
    for tokens, past in ((256, 0), (1024, 4096), (64, 30_000)):
        assert speed.seconds(tokens, past) == pytest.approx(2e-3 * tokens + 4e-7 * tokens * (tokens + 2 * past))


def test_a_right_line_stays_right_where_only_short_prompts_are_seen():
    speed = PrefillSpeed(400.0)
    speed.recall(1e-3, 2e-7)
    for _ in range(10):
        speed.observe(256, 0, 1e-3 * 256 + 2e-7 * 256 * 256)
    assert speed.seconds(4096, 0) == pytest.approx(1e-3 * 4096 + 2e-7 * 4096**2, rel=0.2)


@pytest.mark.parametrize("wrong", [0.05, 0.3, 3.0, 20.0])
def test_a_wrong_file_is_corrected_within_ten_prompts(wrong: float):
    """As quickly as a wrong guess is, or quicker: lengths vary, so that both coefficients show."""
    a, b = 1e-3, 2e-7
    recalled, guessed = PrefillSpeed(400.0), PrefillSpeed(1 / (a * wrong))
    recalled.recall(a * wrong, b * wrong)
    for i in range(10):
        tokens, past = 256 * (1 + i % 5), 512 * (i % 3)
        for speed in (recalled, guessed):
            speed.observe(tokens, past, a * tokens + b * tokens * (tokens + 2 * past))

    def error(speed: PrefillSpeed) -> float:
        truth = a * 1024 + b * 1024 * (1024 + 2 * 512)
        return abs(speed.seconds(1024, 512) - truth) / truth

    assert error(recalled) < max(0.2, 1.05 * error(guessed))


def test_a_wrong_step_time_is_corrected_at_once():
    step = StepTime(0.03)
    step.recall(3.0, 0.0, 0.0)
    assert step.seconds(4, 1000) == pytest.approx(3.0)
    for i in range(10):
        step.observe(1 + i % 4, 1000, 0.02)
    assert step.seconds(2, 1000) == pytest.approx(0.02, rel=0.2)


def test_a_right_step_time_stays_right_through_a_few_steps():
    step = StepTime(0.03)
    step.recall(0.02, 1e-3, 1e-7)
    for _ in range(3):
        step.observe(4, 4000, 0.02 + 4e-3 + 4e-4)
    assert step.seconds(4, 4000) == pytest.approx(0.0244, rel=0.01)
    assert step.seconds(16, 100_000) == pytest.approx(0.02 + 16e-3 + 1e-2, rel=0.1)


def test_nothing_is_recalled_over_what_was_seen():
    line, step, loads, links = PrefillSpeed(400.0), StepTime(0.03), LoadSpeeds(), LinkSpeeds(1e9)
    line.observe(1024, 0, 1.0)
    step.observe(1, 100, 0.02)
    loads.observe(2**20, 0, 0, 0, 0.01)
    links.observe(0, 1, 2**20, 0.01)
    before = line.seconds(500), step.seconds(2, 100), loads.per_byte, links.learnt(9), links.learnt_out()
    line.recall(1.0, 0.0)
    step.recall(1.0, 0.0, 0.0)
    loads.recall((1e-5,) * 4)
    links.recall(0, 1, 1e5)
    links.recall_out(0, 1e5)
    assert (line.seconds(500), step.seconds(2, 100), loads.per_byte, links.learnt(9), links.learnt_out()) == before


# --- in the scheduler's state ---------------------------------------------------------------------------------------------


def experienced() -> Scene:
    """Two nodes; p0 is slow and p1 is quick, n1 pulls slowly from n0, d0 has decoded."""
    scene = small_cluster(nodes=2, prefill=2, decode=1)
    scene.beat(3)
    for i in range(20):
        scene.workers["p0"].load = PrefillLoad(0, 0, 0, finished=((f"a{i}", 0, 1024, 0, 4.0),), loads=((2**24, 0, 0, 0, 0.05),))
        scene.workers["p1"].load = PrefillLoad(0, 0, 0, finished=((f"b{i}", 0, 1024, 0, 0.5),))
        scene.workers["d0"].load = DecodeLoad(0, 0, 100, 100, 0.0, steps=((4, 4000, 0.05),))
        here = "tcp://n1/a"
        pulls = NodeLoad(here, "tcp://n1/events", 100, 50, BLOCK_BYTES, local=here, pulls=(("n0", 2**24, 0.1),))
        scene.state.handle(NodeReport("n1", "a", pulls), scene.now)
        scene.beat()
    for worker in scene.workers.values():
        worker.load = PrefillLoad(0, 0, 0) if worker.id != "d0" else DecodeLoad(0, 0, 100, 100, 0.0)
    scene.beat()
    return scene


def fresh(speeds: Speeds | None, *, late: bool = False) -> Scene:
    """The same cluster as its next scheduler sees it."""
    scene = small_cluster(nodes=2, prefill=2, decode=1)
    scene.state = SchedulerState(scene.state.settings)
    for worker in scene.workers.values():
        worker.fence = 0
    if speeds is not None and not late:
        assert scene.state.handle(SpeedsRecalled(speeds), scene.now) == []
    scene.beat(3)
    if speeds is not None and late:
        assert scene.state.handle(SpeedsRecalled(speeds), scene.now) == []
    return scene


def route(scene: Scene) -> Plan:
    plan = scene.state.route(RouteRequest("r", 0, keys_of("doc", 16), 1030, 10), scene.now)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("late", [False, True])
def test_the_next_scheduler_begins_with_what_this_one_has_learnt(late: bool):
    learnt = experienced().state.learnt()
    assert learnt.prefill["p0"][0] == pytest.approx(4.0 / 1024, rel=0.3)
    assert set(learnt.prefill) == {"p0", "p1"}
    assert set(learnt.loads) == {"p0"}
    assert set(learnt.steps) == {"d0"}
    assert set(learnt.senders) == {"n0"}
    assert [link[:2] for link in learnt.links] == [("n0", "n1")]
    scene = fresh(from_json(to_json(learnt, MODEL))[0], late=late)
    plan = route(scene)
    assert plan.prefill_worker == "p1"
    assert plan.terms.compute_s == pytest.approx(0.5, rel=0.2)
    assert scene.state.learnt() == learnt
    assert route(fresh(None)).terms.compute_s > 2.0


def test_what_was_recalled_is_kept_for_those_who_were_not_seen():
    absent = Speeds({"p9": (1e-3, 0.0)}, {"p9": (1e-9,) * 4}, {"d9": (0.1, 0.0, 0.0)}, {"n9": 1e9}, (("n8", "n9", 2e9),))
    scene = fresh(absent)
    assert scene.state.learnt() == absent
    scene.workers["p0"].load = PrefillLoad(0, 0, 0, finished=(("a", 0, 1024, 0, 4.0),))
    scene.beat()
    assert set(scene.state.learnt().prefill) == {"p0", "p9"}


def test_asking_what_was_learnt_changes_no_decision():
    """Else a journal could not be replayed: nobody records who looked."""
    left, right = experienced(), experienced()
    for i in range(30):
        left.state.learnt()
        left.state.view(left.now)
        request = RouteRequest(f"r{i}", 0, keys_of(f"doc{i % 3}", 8), 520, 40)
        assert pack(left.state.route(request, left.now)) == pack(right.state.route(request, right.now))
        for scene in (left, right):
            scene.workers["d0"].load = DecodeLoad(1, 0, 100, 90, 0.0, steps=((1 + i % 5, 900 * i, 0.03 + 0.001 * i),))
            scene.beat()
    assert left.state.learnt() == right.state.learnt()
