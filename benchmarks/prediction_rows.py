"""Predicted against actual time to first token, on a live cluster."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Final

from benchmarks.cluster_latency import first_token, words
from benchmarks.figures import Row, at_most
from benchmarks.harness import registry
from benchmarks.prompts import Words
from benchmarks.served import Served, cluster

WARM_UP: Final = 50
MEASURED: Final = 100
CLIENTS: Final = 2
LENGTHS: Final = (32, 64, 128, 256, 512)
DOCUMENT: Final = 256
SHARED: Final = 4
"""Documents that prompts begin with, so that there are hits."""
METRIC: Final = "moonpool_gateway_ttft_prediction_error_ratio"


@registry.benchmark("route_prediction_error_p50", needs=[cluster, words])
def prediction(served: Served, words: Words) -> Iterator[Row]:
    """Absolute relative error, median of ``MEASURED`` requests after ``WARM_UP`` others, from ``CLIENTS`` clients in a closed
    loop: prompts of 32 to 768 tokens, half of them with a prefix that is cached. Interpolated between the buckets of the
    gateway's histogram."""
    draw = random.Random(11)
    documents = [words.text(DOCUMENT, seed=9000 + i) for i in range(SHARED)]

    def prompts(count: int) -> list[str]:
        return [
            (draw.choice(documents) if draw.random() < 0.5 else "") + words.text(draw.choice(LENGTHS), seed=draw.randrange(10**6))
            for _ in range(count)
        ]

    _ask(served, prompts(WARM_UP))
    before = _buckets(served)
    _ask(served, prompts(MEASURED))
    after = _buckets(served)
    counts = [(edge, after[edge] - before.get(edge, 0.0)) for edge in after]
    yield Row("route_prediction_error_p50", _median(counts), "", target=at_most(0.2))


def _ask(served: Served, prompts: list[str]) -> None:
    """All of ``prompts``, each client its share. Raises what a client raised."""
    failed: list[BaseException] = []

    def client(mine: list[str]) -> None:
        try:
            for prompt in mine:
                first_token(served, prompt, answer=8)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(prompts[i::CLIENTS],)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _buckets(served: Served) -> dict[float, float]:
    """Upper edge to how many were at most that."""
    found: dict[float, float] = {}
    for line in served.http.get("/metrics").text.splitlines():
        if line.startswith(f"{METRIC}_bucket"):
            edge, count = line.split('le="')[1].split('"} ')
            found[float(edge.replace("+Inf", "inf"))] = float(count)
    return found


def _median(counts: list[tuple[float, float]]) -> float:
    """Of cumulative ``counts`` by upper edge."""
    half, low, below = counts[-1][1] / 2, 0.0, 0.0
    for edge, upto in counts:
        if upto >= half:
            return low if edge == float("inf") else low + (edge - low) * (half - below) / max(1e-9, upto - below)
        low, below = edge, upto
    return low
