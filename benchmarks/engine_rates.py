"""The engine beside stock transformers: rows from ``engine_speed.py``, measured in a process of its own (its threads and memory
go with it)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.harness import Row, Samples, at_least, registry

TIMEOUT_S: Final = 1800.0
DTYPES: Final = ("float32", "bfloat16")
LENGTHS: Final = (512, 2048)
CONTEXTS: Final = (256, 1024)
BATCHES: Final = (1, 4, 16)


def threads() -> int:
    return os.cpu_count() or 1


@registry.benchmark(*(f"prefill_engine_{dtype}_{length}" for dtype in DTYPES for length in LENGTHS))
def prefill() -> Iterator[Row]:
    """Engine prefill over the stock forward of the whole prompt, same dtype and threads."""
    for dtype in DTYPES:
        for length, rates in _measured("prefill", dtype).items():
            ours, stock = Samples(tuple(rates["engine"])), Samples(tuple(rates["stock_forward"]))
            reference = f"stock forward: {stock.median:.0f} tok/s"
            ratio = ours.median / stock.median
            yield ours.row(f"prefill_engine_{dtype}_{length}", "tok/s", reference=reference, ratio=ratio, target=at_least(0.95))


@registry.benchmark(*(f"decode_engine_{dtype}_c{c}_b{b}" for dtype in DTYPES for c in CONTEXTS for b in BATCHES))
def decode() -> Iterator[Row]:
    """Engine decode over the better of stock generate and transformers' own continuous batching."""
    for dtype in DTYPES:
        for cell, rates in _measured("decode", dtype).items():
            context, batch = cell.split(",")
            ours = Samples(tuple(rates.pop("engine")))
            best, peer = max((Samples(tuple(values)).median, name) for name, values in rates.items())
            others = ", ".join(f"{name} {Samples(tuple(values)).median:.0f}" for name, values in rates.items())
            row = f"decode_engine_{dtype}_c{context}_b{batch}"
            yield ours.row(row, "tok/s", reference=f"{others}; best: {peer}", ratio=ours.median / best, target=at_least(1.15))


def _measured(kind: str, dtype: str) -> dict[str, dict[str, list[float]]]:
    command = [sys.executable, "-m", "benchmarks.engine_rates", kind, dtype, str(threads())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} in {dtype} failed: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from benchmarks.engine_speed import decode_rates, prefill_rates
    from engine.models.source import resolve_model
    from engine.settings import ModelSettings

    kind, dtype, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    files = resolve_model(ModelSettings.model_validate({"dtype": dtype, "device": "cpu"}))
    rates: dict[Any, Any] = (
        prefill_rates(files, threads=count, lengths=LENGTHS)
        if kind == "prefill"
        else decode_rates(files, threads=count, contexts=CONTEXTS, batches=BATCHES)
    )
    named = {",".join(map(str, key)) if isinstance(key, tuple) else str(key): value for key, value in rates.items()}
    print(json.dumps(named))


if __name__ == "__main__":
    main()
