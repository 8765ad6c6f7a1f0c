"""What a request costs on its way through the cluster: cold against warm, against the bare engine, and the handoff."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.figures import Row, Samples, at_most
from benchmarks.harness import Fixture, registry
from benchmarks.line_process import LineProcess
from benchmarks.machine import worker_threads
from benchmarks.prompts import Words
from benchmarks.served import Served, cluster

REPEATS: Final = 7
ENGINE_START_S: Final = 120.0
ENGINE_ANSWER_S: Final = 120.0


def _default_words() -> Words:
    from engine.models.source import resolve_model
    from engine.settings import ModelSettings

    return Words.of_model(resolve_model(ModelSettings()).path)


class _Given:
    """A fixture's context around something that needs no closing."""

    def __enter__(self) -> Words:
        return _default_words()

    def __exit__(self, *_: object) -> None:
        pass


def _bare_engine() -> LineProcess:
    command = [sys.executable, "-m", "benchmarks.engine_child", "auto", str(worker_threads())]
    return LineProcess("the bare engine", command, start_timeout_s=ENGINE_START_S)


words: Final = Fixture("words", _Given)
bare_engine: Final = Fixture("bare engine", _bare_engine)


@dataclass(frozen=True, slots=True)
class Timed:
    """As the client sees it. ``handoff_s`` as the decode worker reports it, None where the answer needed no decode."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    handoff_s: float | None


def first_token(served: Served, prompt: str, *, answer: int = 2) -> Timed:
    """Stream a completion of ``prompt`` to its end; time to the first piece of text. Raises RuntimeError where there is none."""
    body = {
        "model": served.model, "prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    started = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    details: dict[str, Any] = {}
    with served.http.stream("POST", "/v1/completions", json=body, headers={"x-moonpool-details": "1"}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {response.read()[:200]!r}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"the stream ended in an error: {chunk['error']}")
            if first is None and any(choice.get("text") for choice in chunk.get("choices", ())):
                first = time.perf_counter() - started
            usage = chunk.get("usage") or usage
            details = chunk.get("moonpool") or details
    if first is None:
        raise RuntimeError("no text came")
    handoff = details["choices"][0]["handoff_s"]
    return Timed(first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], handoff)


def expect(timed: Timed, *, prompt: int, cached: int) -> Timed:
    """Raises RuntimeError where the request was not the one to be measured."""
    if (timed.prompt_tokens, timed.cached_tokens) != (prompt, cached):
        raise RuntimeError(
            f"not what is to be measured: {timed.cached_tokens} of {timed.prompt_tokens} tokens cached, "
            f"expected {cached} of {prompt}"
        )
    return timed


@registry.benchmark("ttft_cold_2088", "ttft_warm_2088", "ttft_warm_over_cold", needs=[cluster, words])
def warm_against_cold(served: Served, words: Words) -> Iterator[Row]:
    """2,048 shared tokens and 40 new ones, through HTTP: first without, then with the 2,048 in the cache."""
    cold, warm = [], []
    for repeat in range(REPEATS + 1):
        shared = words.text(2048, seed=1000 + repeat)
        first = expect(first_token(served, shared + words.text(40, seed=2000 + repeat)), prompt=2088, cached=0)
        second = expect(first_token(served, shared + words.text(40, seed=3000 + repeat)), prompt=2088, cached=2048)
        if repeat:  # the first pair warms up
            cold.append(first.ttft_s * 1e3)
            warm.append(second.ttft_s * 1e3)
    ours, theirs = Samples(tuple(warm)), Samples(tuple(cold))
    yield theirs.row("ttft_cold_2088", "ms")
    yield ours.row("ttft_warm_2088", "ms")
    ratio = ours.over(theirs)
    yield ratio.row("ttft_warm_over_cold", "ratio", beside="this run's ttft_cold_2088", target=at_most(0.12))


@registry.benchmark("handoff_exposed_1800", needs=[cluster, words])
def exposed_handoff(served: Served, words: Words) -> Iterator[Row]:
    """End of prefill compute to the start of the decode worker's first step, 1,800 cold tokens, as the workers report it."""
    milliseconds = []
    for repeat in range(REPEATS):
        timed = expect(first_token(served, words.text(1800, seed=7000 + repeat), answer=4), prompt=1800, cached=0)
        if timed.handoff_s is None:
            raise RuntimeError("the decode worker reported no handoff")
        milliseconds.append(1e3 * timed.handoff_s)
    yield Samples(tuple(milliseconds)).row("handoff_exposed_1800", "ms", target=at_most(25))


@registry.benchmark("overhead_ttft_512", needs=[cluster, words, bare_engine])
def over_the_bare_engine(served: Served, words: Words, engine: LineProcess) -> Iterator[Row]:
    """TTFT of 512 cold tokens on an idle cluster minus the same prefill on a bare engine, in its own process, same threads."""
    bare, over = [], []
    for repeat in range(2 * REPEATS + 1):
        prompt = words.text(512, seed=5000 + repeat)
        through = 1e3 * expect(first_token(served, prompt), prompt=512, cached=0).ttft_s
        alone = 1e3 * engine.ask(ENGINE_ANSWER_S, do="prefill", prompt=words.ids(prompt))["seconds"]
        if repeat:  # the first pair warms up
            bare.append(alone)
            over.append(through - alone)
    reference = Samples(tuple(bare)).median
    yield Samples(tuple(over)).row(
        "overhead_ttft_512", "ms", reference=reference, beside="bare engine prefill", target=at_most(20)
    )
