"""Two pool nodes and decode caches that are too small: blocks travel, answers are preempted, and nobody can tell from the
text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.conftest import TEXT, ClusterProcess, all_free, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def crossed(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """One prefill worker at node-0; decode workers at node-0 and node-1, with room for one answer and a half each."""
    settings = tiny_settings | {
        "pool": tiny_settings["pool"] | {"nodes": 2},
        "decode": tiny_settings["decode"] | {"workers": 2, "device_cache": "320KiB"},
        "scheduler": {"expected_output_tokens": 16},
    }
    cluster = ClusterProcess(settings, log=tmp_path_factory.mktemp("crossed") / "launcher.log")
    yield cluster
    cluster.stop()


def test_blocks_cross_from_node_to_node_and_preempted_answers_go_on(crossed: ClusterProcess):
    prompts = [f"{i} crossing " + TEXT * 4 for i in range(12)]
    complete(crossed, "the first request finds everything cold", 2)
    # All at once, before the scheduler has learned how long these answers are and would keep room for them.
    with ThreadPoolExecutor(12) as pool:
        together = list(
            pool.map(lambda prompt: complete(crossed, prompt, 300, extra_body={"ignore_eos": True}).choices[0].text, prompts)
        )
    stats = crossed.stats()
    alone = [complete(crossed, prompt, 300, extra_body={"ignore_eos": True}).choices[0].text for prompt in prompts[:3]]
    assert together[:3] == alone
    assert stats["node-1"]["bytes_in"] > 0, "nothing was fetched from the other node"
    assert stats["decode-0"]["preempted_total"] + stats["decode-1"]["preempted_total"] > 0, "the cache was never full"
    eventually(lambda: all_free(crossed), what="all blocks are free")
