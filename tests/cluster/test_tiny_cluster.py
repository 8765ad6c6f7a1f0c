"""The whole path on real processes and sockets, with a model that computes in no time: what a client sees, and what is left
behind."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.cluster.conftest import TEXT, ClusterProcess, all_free, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_second_request_finds_the_firsts_blocks_and_says_the_same(tiny_cluster: ClusterProcess):
    prompt = "first " + TEXT * 6
    cold, warm = complete(tiny_cluster, prompt), complete(tiny_cluster, prompt)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens >= warm.usage.prompt_tokens - 17
    assert warm.choices[0].text == cold.choices[0].text


def test_generated_blocks_are_found_by_the_next_turn(tiny_cluster: ClusterProcess):
    prompt = "turn one " + TEXT * 2
    answer = complete(tiny_cluster, prompt, 64, extra_body={"ignore_eos": True})
    following = complete(tiny_cluster, prompt + answer.choices[0].text + " and then?", 8)
    blocks_of_prompt = answer.usage.prompt_tokens // 16 * 16
    # Encoding an answer's text may give other tokens than were drawn; as far as they agree, the answer's own blocks are reused.
    assert following.usage.prompt_tokens_details.cached_tokens >= blocks_of_prompt


def test_streaming_and_not_streaming_agree(tiny_cluster: ClusterProcess):
    prompt = "stream " + TEXT
    stream = complete(tiny_cluster, prompt, 40, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    whole = complete(tiny_cluster, prompt, 40)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seeded_draw_is_the_same_alone_and_in_company(tiny_cluster: ClusterProcess):
    def ask(seed: int) -> str:
        answer = tiny_cluster.client().completions.create(
            model=tiny_cluster.model, prompt="draw " + TEXT, max_tokens=24, temperature=1.0, top_p=0.9, seed=seed
        )
        return answer.choices[0].text

    alone = ask(5)
    with ThreadPoolExecutor(8) as pool:
        company = list(pool.map(ask, [5, 1, 2, 5, 3, 4, 5, 6]))
    assert company[0] == company[3] == company[6] == alone
    assert len(set(company)) > 2


def test_one_token_needs_no_decode_worker(tiny_cluster: ClusterProcess):
    before = tiny_cluster.stats()["decode-0"]["sequences_total"]
    answer = complete(tiny_cluster, "one " + TEXT, 1)
    assert answer.usage.completion_tokens == 1
    assert tiny_cluster.stats()["decode-0"]["sequences_total"] == before


def test_siblings_that_come_together_compute_their_common_prefix_once(tiny_cluster: ClusterProcess):
    prefix, before = "siblings " + TEXT * 64, tiny_cluster.stats()["prefill-0"]["tokens_computed_total"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: complete(tiny_cluster, f"{prefix}, said {i}", 2), range(8)))
    computed = tiny_cluster.stats()["prefill-0"]["tokens_computed_total"] - before
    own = 40  # of each: its own words, and what the prefix has beyond its last whole block
    assert answers[0].usage.prompt_tokens > 1000
    assert computed <= answers[0].usage.prompt_tokens + 7 * own


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_request_within_a_second(tiny_cluster: ClusterProcess, streaming: bool):
    body = {
        "model": tiny_cluster.model, "prompt": "leave " + TEXT, "max_tokens": 1800, "temperature": 0, "stream": streaming,
        "ignore_eos": True,
    }  # fmt: skip

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=tiny_cluster.url, timeout=30) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            running = 0
            for _ in range(400):
                stats = await asyncio.to_thread(tiny_cluster.stats)
                running = stats["decode-0"]["cache_blocks"] - stats["decode-0"]["cache_blocks_free"]
                if running:
                    break
                await asyncio.sleep(0.01)
            assert running, "the request never reached the decode worker"
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(leave())
    started = time.monotonic()
    eventually(lambda: all_free(tiny_cluster), within_s=5, what="the request's blocks are free")
    assert time.monotonic() - started < 1.5  # the promise is a second; the rest is for asking


def test_bad_input_costs_no_worker_anything(tiny_cluster: ClusterProcess):
    before = tiny_cluster.stats()
    for body in (
        b"{",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "other", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": 100000}',
        b'{"model": "tiny", "prompt": "x", "temperature": -1}',
        b'{"model": "tiny", "prompt": "x", "n": 1000}',
    ):
        answer = httpx.post(
            f"{tiny_cluster.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=10
        )
        assert 400 <= answer.status_code < 500, body
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    after = tiny_cluster.stats()
    assert after["prefill-0"]["prompts_total"] == before["prefill-0"]["prompts_total"]
    assert after["decode-0"]["sequences_total"] == before["decode-0"]["sequences_total"]


def test_metrics_and_health(tiny_cluster: ClusterProcess):
    assert httpx.get(f"{tiny_cluster.url}/health", timeout=10).status_code == 200
    assert httpx.get(f"{tiny_cluster.url}/live", timeout=10).status_code == 200
    assert "moonpool_gateway" in httpx.get(f"{tiny_cluster.url}/metrics", timeout=10).text


def test_every_listening_socket_is_on_loopback(tiny_cluster: ClusterProcess):
    """Whoever reaches Ray's ports can run code, so none is reachable (docs/decisions/0004-ray-on-loopback.md)."""
    root = psutil.Process(tiny_cluster.pid)
    family = {root.pid, *(child.pid for child in root.children(recursive=True))}
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in family]
    assert len(listening) > 5
    wide = {c.laddr.ip for c in listening} - {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert not wide
