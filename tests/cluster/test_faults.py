"""A worker or pool node killed or frozen at any phase: the answer is the undisturbed one, nothing hangs, nothing leaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.conftest import ClusterProcess, all_free, eventually
from tests.cluster.faults import FOLDER_VARIABLE, arm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ANSWER_WITHIN_S = 40.0
PROMPT = "the cat sat on the mat and the dog jumps over the quick brown fox " * 8


@pytest.fixture(scope="module")
def fault_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def pairs(
    tiny_settings: dict[str, Any], fault_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcess]:
    """Two prefill and two decode workers, so that there is somewhere else to go."""
    settings = tiny_settings | {
        "prefill": tiny_settings["prefill"] | {"workers": 2, "publish_timeout_s": 3.0, "load_timeout_s": 2.0},
        "decode": tiny_settings["decode"] | {"workers": 2},
        "scheduler": {"suspect_after_s": 1.0, "dead_after_s": 2.0},
    }
    log = tmp_path_factory.mktemp("cluster") / "launcher.log"
    cluster = ClusterProcess(settings, environment={FOLDER_VARIABLE: str(fault_folder)}, log=log)
    yield cluster
    cluster.stop()


def ask(cluster: ClusterProcess, prompt: str, *, tokens: int = 24) -> str:
    answer = cluster.client().completions.create(model=cluster.model, prompt=prompt, max_tokens=tokens, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens or answer.choices[0].finish_reason == "stop"
    return answer.choices[0].text


def wait_until_whole(cluster: ClusterProcess, workers: int = 5) -> None:
    """All processes are back and routable."""

    def whole() -> bool:
        stats = cluster.stats()
        return len(stats) == workers and all(s.get("pool_connected", 1) for s in stats.values())

    eventually(whole, within_s=60, what="every worker is back")

    def routable() -> bool:
        view = cluster.call("view")
        return sum(w["standing"] == "live" for w in view["workers"]) == workers - 1

    eventually(routable, within_s=30, what="the scheduler counts every worker as live")


def nothing_leaks(cluster: ClusterProcess) -> None:
    """Every lease, reservation and device block is back."""

    eventually(lambda: all_free(cluster), within_s=30, what="leases, reservations and blocks are back")


POINTS = [
    ("prefill", "queued"),
    ("prefill", "loading"),
    ("prefill", "computing"),
    ("prefill", "handing_over"),
    ("decode", "queued"),
    ("decode", "loading"),
    ("decode", "joining"),
    ("decode", "decoding"),
]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize(("role", "point"), POINTS, ids=[f"{role}-{point}" for role, point in POINTS])
def test_a_worker_lost_at_any_phase_costs_time_but_no_token(
    pairs: ClusterProcess, fault_folder: Path, role: str, point: str, sig: signal.Signals
):
    wait_until_whole(pairs)
    shared = f"{point} {sig.name} " + PROMPT
    ask(pairs, shared)  # so that a later prompt has a prefix to load
    prompt = shared + f"{role} says"
    orders = [arm(fault_folder, f"{role}-{i}", point, sig) for i in (0, 1)]
    victims: list[int] = []
    try:
        started = time.monotonic()
        pids = {worker: pid for worker, _, pid in pairs.call("workers")}
        disturbed = ask_while_one_fault_fires(pairs, prompt, orders)
        assert time.monotonic() - started < ANSWER_WITHIN_S
        fired = [order for order in orders if not order.exists()]
        assert fired, "the fault did not happen: the test shows nothing"
        victims = [pids[order.name.split(".")[0]] for order in fired]
    finally:
        for order in orders:
            order.unlink(missing_ok=True)
        if sig is signal.SIGSTOP:
            for pid in victims:
                os.kill(pid, signal.SIGCONT)
    wait_until_whole(pairs)
    assert disturbed == ask(pairs, prompt)
    nothing_leaks(pairs)


def ask_while_one_fault_fires(cluster: ClusterProcess, prompt: str, orders: list[Path]) -> str:
    """Ask; once one worker took its order, the other's is withdrawn, so that exactly one fault happens."""
    import threading

    done = threading.Event()

    def withdraw() -> None:
        while not done.wait(0.002):
            gone = [order for order in orders if not order.exists()]
            if gone:
                for order in orders:
                    order.unlink(missing_ok=True)
                return

    watcher = threading.Thread(target=withdraw)
    watcher.start()
    try:
        return ask(cluster, prompt)
    finally:
        done.set()
        watcher.join(5)


def status_of(cluster: ClusterProcess, prompt: str) -> int:
    try:
        ask(cluster, prompt)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_pool_node_lost_while_answers_run_is_survived(pairs: ClusterProcess, sig: signal.Signals):
    wait_until_whole(pairs)
    prompt = f"node {sig.name} " + PROMPT
    stream = pairs.client().completions.create(model=pairs.model, prompt=prompt, max_tokens=200, temperature=0, stream=True)
    text, pid = "", None
    for chunk in stream:
        text += chunk.choices[0].text if chunk.choices else ""
        if pid is None:
            pid = pairs.call("kill", worker="node-0", signal=int(sig))
    if sig is signal.SIGSTOP:
        # A request that needs the frozen node ends in bounded time, one way or the other.
        started = time.monotonic()
        outcome = status_of(pairs, "while frozen " + PROMPT)
        assert outcome in (200, 429, 500, 503, 504)
        assert time.monotonic() - started < ANSWER_WITHIN_S
        os.kill(pid, signal.SIGCONT)
    wait_until_whole(pairs)
    assert text == ask(pairs, prompt, tokens=200)
    nothing_leaks(pairs)
