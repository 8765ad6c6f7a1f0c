"""The engine beside stock transformers: rows from ``engine_speed.py``, a process per row (its threads and memory go with it).

``python -m benchmarks.engine_rates prefill DTYPE LENGTH THREADS`` and ``... decode DTYPE CONTEXT BATCH THREADS`` measure one row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.figures import Row, Samples, at_least
from benchmarks.harness import registry
from benchmarks.line_process import REPOSITORY
from benchmarks.machine import threads

TIMEOUT_S: Final = 900.0
DTYPES: Final = ("float32", "bfloat16")
LENGTHS: Final = (512, 2048)
CONTEXTS: Final = (256, 1024)
BATCHES: Final = (1, 4, 16)
TAIL_CHARS: Final = 400

Rates = dict[str, list[float]]


def measured(*what: str) -> Rates:
    """Tokens per second of each candidate, from a process of its own. Raises RuntimeError with the end of what it said."""
    command = [sys.executable, "-m", "benchmarks.engine_rates", *what, str(threads())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=REPOSITORY)
    if done.returncode:
        raise RuntimeError(f"{' '.join(what)} failed: {done.stderr.strip()[-TAIL_CHARS:]}")
    return json.loads(done.stdout.splitlines()[-1])


def prefill(dtype: str, length: int) -> Callable[[], Iterator[Row]]:
    """Engine prefill over the stock forward of the whole prompt, same dtype and threads."""

    def measure() -> Iterator[Row]:
        rates = measured("prefill", dtype, str(length))
        ours, stock = Samples(tuple(rates["engine"])), Samples(tuple(rates["stock_forward"]))
        yield ours.row_beside(f"prefill_engine_{dtype}_{length}", "tok/s", stock, "stock forward", target=at_least(0.95))

    return measure


def decode(dtype: str, context: int, batch: int) -> Callable[[], Iterator[Row]]:
    """Engine decode over the better of stock generate and transformers' own continuous batching."""

    def measure() -> Iterator[Row]:
        rates = {name: Samples(tuple(values)) for name, values in measured("decode", dtype, str(context), str(batch)).items()}
        ours = rates.pop("engine")
        best = max(rates, key=lambda name: rates[name].median)
        slower = ", ".join(f"{name} {samples.median:.4g}" for name, samples in rates.items() if name != best)
        beside = f"{best} ({slower})" if slower else best
        name = f"decode_engine_{dtype}_c{context}_b{batch}"
        yield ours.row_beside(name, "tok/s", rates[best], beside, target=at_least(1.15))

    return measure


for _dtype in DTYPES:
    for _length in LENGTHS:
        registry.benchmark(f"prefill_engine_{_dtype}_{_length}")(prefill(_dtype, _length))
    for _context in CONTEXTS:
        for _batch in BATCHES:
            registry.benchmark(f"decode_engine_{_dtype}_c{_context}_b{_batch}")(decode(_dtype, _context, _batch))


def main(kind: str, dtype: str, *numbers: str) -> None:
    from benchmarks.engine_speed import decode_rates, prefill_rates
    from engine.models.source import resolve_model
    from engine.settings import ModelSettings

    files = resolve_model(ModelSettings.model_validate({"dtype": dtype, "device": "cpu"}))
    if kind == "prefill":
        length, count = map(int, numbers)
        (rates,) = prefill_rates(files, threads=count, lengths=(length,)).values()
    else:
        context, batch, count = map(int, numbers)
        (rates,) = decode_rates(files, threads=count, contexts=(context,), batches=(batch,)).values()
    print(json.dumps(rates))


if __name__ == "__main__":
    main(*sys.argv[1:])
