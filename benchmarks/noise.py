"""How steady the machine is while it measures: a fixed piece of work on one thread, over and over, before each benchmark."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Final

from benchmarks.figures import Row, Samples


class NoiseProbe:
    """Spread of a fixed computation over the whole run; a run whose probe spreads much says little about anything else."""

    NAME: Final = "noise_hash"
    REPEATS: Final = 10

    def __init__(self, size: int = 4 << 20) -> None:
        self._data = bytes(size)
        self._milliseconds: list[float] = []
        self._loads: list[float] = []

    def sample(self) -> None:
        self._loads.append(os.getloadavg()[0])
        self._milliseconds += [self._once() for _ in range(self.REPEATS)]

    def row(self) -> Row:
        return Samples(tuple(self._milliseconds)).row(self.NAME, "ms", beside="its own 10..90 % is the machine's noise")

    def summary(self) -> str:
        """One line for under the table."""
        samples = Samples(tuple(self._milliseconds))
        low, high = samples.spread.low / samples.median, samples.spread.high / samples.median
        return (
            f"machine noise: a fixed computation took {low:.2f}..{high:.2f} of its median (10..90 %) over this run; "
            f"load average {min(self._loads):.1f}..{max(self._loads):.1f} on {os.cpu_count()} cores"
        )

    def _once(self) -> float:
        started = time.perf_counter()
        hashlib.blake2b(self._data).digest()
        return 1e3 * (time.perf_counter() - started)
