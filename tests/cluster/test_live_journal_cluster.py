"""A whole cluster's scheduler, with a worker killed under it, is written down and done again; and what it learnt is kept."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.simulator.replay import replay_journal
from scheduler.speeds import from_json
from tests.cluster.conftest import TEXT, ClusterProcess, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def ask(cluster: ClusterProcess, prompt: str) -> bool:
    """Whether it was answered: a busy machine's workers may be silent for long enough that a request finds none."""
    try:
        return complete(cluster, prompt, 12).usage.completion_tokens > 0
    except openai.APIStatusError:
        return False


def test_a_clusters_decisions_replay_byte_for_byte_and_its_speeds_outlive_it(tiny_settings: dict[str, Any], tmp_path: Path):
    journal = tmp_path / "journal"
    settings = tiny_settings | {
        "prefill": tiny_settings["prefill"] | {"workers": 2},
        "scheduler": {"journal": str(journal)},
    }
    cluster = ClusterProcess(settings, log=tmp_path / "launcher.log")
    try:
        prompts = [f"{i % 3} {TEXT * (1 + i % 4)}" for i in range(24)]
        with ThreadPoolExecutor(4) as clients:
            answered = sum(clients.map(lambda prompt: ask(cluster, prompt), prompts[:16]))
            cluster.call("kill", worker="prefill-1", signal=int(signal.SIGKILL))
            answered += sum(clients.map(lambda prompt: ask(cluster, prompt), prompts[16:]))
        eventually(lambda: cluster.call("view")["counters"].get("workers_lost"), what="the loss is noticed")
        assert answered >= 8, "most are answered, however busy the machine is"
        # The gateway tells what came of a request after its client has the answer.
        eventually(
            lambda: cluster.call("view")["prediction"]["count"] >= answered, what="all predictions are held against the truth"
        )
        assert cluster.call("view")["journal"]["ended"] == ""
        shown = httpx.get(f"{cluster.url}/metrics", timeout=10).text
        assert "moonpool_gateway_ttft_after_plan_seconds_count" in shown
    finally:
        cluster.stop()

    report = replay_journal(journal)
    assert report.equal, report
    assert report.plans >= answered
    (kept,) = (tmp_path / "state" / "moonpool" / "speeds").iterdir()
    speeds, model = from_json(kept.read_bytes())
    assert model.endswith(" float32 auto 2+1 workers")
    assert "prefill-0" in speeds.prefill
    assert set(speeds.steps) == {"decode-0"}
