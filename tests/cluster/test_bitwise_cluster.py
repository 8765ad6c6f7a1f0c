"""``reuse: bitwise``: a cached run equals a cold one to the last bit, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.conftest import TEXT, ClusterProcess, complete

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def bitwise(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    settings = tiny_settings | {"model": tiny_settings["model"] | {"reuse": "bitwise"}}
    cluster = ClusterProcess(settings, log=tmp_path_factory.mktemp("bitwise") / "launcher.log")
    yield cluster
    cluster.stop()


def test_bitwise_reuse_gives_the_same_logprobs_to_the_last_bit(bitwise: ClusterProcess):
    prompt = "bitwise " + TEXT * 6

    def logprobs() -> tuple[list[float], int]:
        answer = complete(bitwise, prompt, 24, logprobs=1)
        return answer.choices[0].logprobs.token_logprobs, answer.usage.prompt_tokens_details.cached_tokens

    cold, none = logprobs()
    warm, cached = logprobs()
    with ThreadPoolExecutor(6) as pool:
        company = list(pool.map(lambda _: logprobs()[0], range(6)))
    assert none == 0
    assert cached > 0
    assert cached % 64 == 0  # whole chunks only
    assert warm == cold
    assert all(row == cold for row in company)
