"""Which job runs when: reads first, writes in an order that a crash cannot harm, and a last one when all are back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kv_pool.ssd.disk.threads import Job, Workers

DEADLINE_S = 20.0


class Recorder:
    """Jobs that say when they begin, and end when they are told to."""

    def __init__(self, threads: int) -> None:
        self.workers = Workers(threads, name="test", clock=time.monotonic)
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self.workers.start()

    def job(self, name: str, group: int | None = None, *, alone: bool = False, then: Callable[[], None] | None = None) -> Job:
        self.gates[name] = threading.Event()

        def run() -> None:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            assert self.gates[name].wait(DEADLINE_S)
            if then is not None:
                then()

        return Job(run, group=group, alone=alone, order=name)

    def submit(self, *args: object, **options: object) -> None:
        assert self.workers.submit(self.job(*args, **options))  # type: ignore[arg-type]

    def wait_for(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= set(self.begun), DEADLINE_S), (names, self.begun)

    def let_go(self, *names: str) -> None:
        for name in names or list(self.gates):
            self.gates[name].set()

    def end(self) -> None:
        self.let_go()
        self.workers.end(Job(lambda: self.begun.append("last")))
        assert self.workers.join(DEADLINE_S)
        assert self.begun[-1] == "last"


def test_a_job_that_is_alone_waits_for_those_before_and_holds_back_those_behind():
    recorder = Recorder(8)
    for name, group, alone in [("a", 1, False), ("b", 1, False), ("seal", 1, True), ("c", 1, False), ("other", 2, True)]:
        recorder.submit(name, group, alone=alone)
    recorder.wait_for("a", "b", "other")
    recorder.let_go("a")
    recorder.submit("more", 2, alone=False)
    assert not {"seal", "c", "more"} & set(recorder.begun)
    recorder.let_go("b")
    recorder.wait_for("seal")
    assert "c" not in recorder.begun
    recorder.let_go("seal", "other")
    recorder.wait_for("c", "more")
    recorder.end()


def test_a_job_may_stop_being_alone_and_may_name_what_follows_it():
    recorder = Recorder(4)
    footer = recorder.job("footer", 1, alone=True)

    def opened() -> None:
        recorder.workers.no_longer_alone()
        recorder.wait_for("b")  # while this one still runs
        assert recorder.workers.submit_next(footer)

    recorder.submit("open", 1, alone=True, then=opened)
    recorder.wait_for("open")
    recorder.submit("b", 1)
    assert "b" not in recorder.begun
    recorder.let_go("open")
    recorder.wait_for("b")
    assert "footer" not in recorder.begun
    recorder.let_go("b")
    recorder.wait_for("footer")
    recorder.end()
    assert recorder.begun == ["open", "b", "footer", "last"]


def test_one_thread_is_kept_for_reads_and_reads_go_first():
    recorder = Recorder(2)
    recorder.submit("write", 1)
    recorder.submit("write too", 2)
    recorder.wait_for("write")
    recorder.submit("read")
    recorder.wait_for("read")
    recorder.submit("read too")
    assert "write too" not in recorder.begun
    recorder.let_go("write")
    recorder.wait_for("read too")
    assert recorder.begun == ["write", "read", "read too"]
    recorder.end()


def test_end_does_what_was_asked_abandon_gives_it_back_and_the_last_job_comes_last():
    recorder = Recorder(1)
    recorder.submit("a", 1)
    recorder.submit("b", 1)
    recorder.wait_for("a")
    recorder.workers.end(Job(lambda: recorder.begun.append("last")))
    assert not recorder.workers.submit(recorder.job("late"))
    recorder.let_go("a", "b")
    assert recorder.workers.join(DEADLINE_S)
    assert recorder.begun == ["a", "b", "last"]

    recorder = Recorder(2)
    refused: list[bool] = []
    recorder.submit("a", 1, then=lambda: refused.append(not recorder.workers.submit_next(Job(lambda: None, group=1))))
    recorder.submit("b", 1, alone=True)
    recorder.wait_for("a")
    dropped = recorder.workers.abandon(Job(lambda: recorder.begun.append("last")))
    assert [job.order for job in dropped] == ["b"]
    assert not recorder.workers.join(0.01)
    assert recorder.begun == ["a"]
    recorder.let_go("a")
    assert recorder.workers.join(DEADLINE_S)
    assert recorder.begun == ["a", "last"]
    assert refused == [True]


def test_the_last_job_runs_once_also_where_nothing_ever_ran():
    for threads in (1, 4):
        recorder = Recorder(threads)
        recorder.end()
        assert recorder.begun == ["last"]


def test_the_silence_of_a_job_is_measured_from_its_last_beat():
    now = [100.0]
    workers = Workers(1, name="test", clock=lambda: now[0])
    workers.start()
    assert workers.oldest_since() is None
    steps = [threading.Event() for _ in range(3)]
    begun, beaten = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        steps[0].wait(DEADLINE_S)
        workers.beat()
        beaten.set()
        steps[1].wait(DEADLINE_S)

    workers.submit(Job(run))
    assert begun.wait(DEADLINE_S)
    assert workers.oldest_since() == 100.0
    now[0] = 107.0
    assert workers.oldest_since() == 100.0
    steps[0].set()
    assert beaten.wait(DEADLINE_S)
    assert workers.oldest_since() == 107.0
    steps[1].set()
    workers.end(Job(lambda: None))
    now[0] = 0.0
    assert workers.join(DEADLINE_S)


def test_a_job_that_fails_does_not_take_its_thread_along(caplog: pytest.LogCaptureFixture):
    workers = Workers(1, name="test", clock=time.monotonic)
    workers.start()
    done = threading.Event()
    workers.submit(Job(lambda: 1 // 0))  # type: ignore[arg-type, return-value]
    workers.submit(Job(done.set))
    assert done.wait(DEADLINE_S)
    assert "a job failed" in caplog.text
    workers.end(Job(lambda: None))
    assert workers.join(DEADLINE_S)
