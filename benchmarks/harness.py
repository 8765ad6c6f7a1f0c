"""Rows, targets, the registry of benchmarks, and how they are run and shown. Knows nothing of what is measured."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Target:
    """``at_most`` or ``at_least`` a number, of the row's ratio where it has one, else of its value."""

    limit: float
    at_most: bool

    def holds(self, figure: float) -> bool:
        return figure <= self.limit if self.at_most else figure >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


def at_most(limit: float) -> Target:
    return Target(limit, at_most=True)


def at_least(limit: float) -> Target:
    return Target(limit, at_most=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``reference`` says what stands beside it, measured in the same run, and ``ratio`` is value / that. ``low`` and
    ``high`` are the 10th and 90th percentile of the repeats: the noise."""

    name: str
    value: float
    unit: str
    reference: str = ""
    ratio: float | None = None
    target: Target | None = None
    low: float | None = None
    high: float | None = None
    skipped: str = ""

    @property
    def holds(self) -> bool | None:
        """None where there is no target, or nothing was measured."""
        if self.target is None or self.skipped:
            return None
        return self.target.holds(self.value if self.ratio is None else self.ratio)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": None if self.skipped else self.value,
            "unit": self.unit,
            "reference": self.reference,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "holds": self.holds,
            "low": self.low,
            "high": self.high,
            "skipped": self.skipped or None,
        }


def skipped(name: str, reason: str) -> Row:
    """A row that could not be measured here: shown, and no failure."""
    return Row(name, 0.0, "", skipped=reason)


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeats of one measurement."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def row(self, name: str, unit: str, *, reference: str = "", ratio: float | None = None, target: Target | None = None) -> Row:
        return Row(name, self.median, unit, reference, ratio, target, self.percentile(0.1), self.percentile(0.9))


def interleaved(repeats: int, *measures: Callable[[], float]) -> list[Samples]:
    """Run all ``measures`` in turn, ``repeats`` times: what the machine does meanwhile hits all of them alike."""
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
    return [Samples(tuple(column)) for column in zip(*rounds, strict=True)]


Measure = Callable[[], Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``names`` are the rows that ``measure`` makes: it runs only when one of them is wanted."""

    names: tuple[str, ...]
    measure: Measure


@dataclass
class Registry:
    benchmarks: list[Benchmark] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Called at the end: shared fixtures (a cluster) that a benchmark started."""

    def benchmark(self, *names: str) -> Callable[[Measure], Measure]:
        """Decorator: the function measures the rows ``names``."""
        taken = {name for known in self.benchmarks for name in known.names}
        if clash := taken & set(names):
            raise ValueError(f"benchmark rows named twice: {sorted(clash)}")

        def add(measure: Measure) -> Measure:
            self.benchmarks.append(Benchmark(names, measure))
            return measure

        return add

    def run(self, only: str | None, on_row: Callable[[Row], None]) -> bool:
        """Run what matches ``only`` (a regular expression searched in row names). Returns False where a target does not hold or a
        benchmark crashed; a skipped row is neither."""
        wanted = re.compile(only or "")
        good = True
        try:
            for benchmark in self.benchmarks:
                if any(wanted.search(name) for name in benchmark.names):
                    good &= self._one(benchmark, wanted, on_row)
        finally:
            for close in reversed(self.closers):
                close()
        return good

    def _one(self, benchmark: Benchmark, wanted: re.Pattern[str], on_row: Callable[[Row], None]) -> bool:
        good = True
        try:
            for row in benchmark.measure():
                if row.name not in benchmark.names:
                    raise ValueError(f"unannounced row {row.name}")
                if wanted.search(row.name):
                    on_row(row)
                    good &= row.holds is not False
        except Exception:
            traceback.print_exc()
            print(f"benchmark of {', '.join(benchmark.names)} crashed", file=sys.stderr)
            return False
        return good


def show(rows: Sequence[Row], console: Console) -> None:
    """The table."""
    table = Table(title="benchmarks")
    for column in ("row", "value", "10..90 %", "unit", "beside", "ratio", "target", "holds"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for row in rows:
        if row.skipped:
            table.add_row(row.name, "-", "", "", f"skipped: {row.skipped}", "", "", "")
            continue
        spread = "" if row.low is None or row.high is None else f"{row.low:.4g}..{row.high:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {None: "", True: "yes", False: "NO"}[row.holds]
        table.add_row(row.name, f"{row.value:.4g}", spread, row.unit, row.reference, ratio, str(row.target or ""), verdict)
    console.print(table)


def write_json(rows: Iterable[Row], path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))


def main(registry: Registry, only: str | None, json_path: Path | None, console: Console) -> int:
    """Run, show, write; exit status 1 where a target does not hold or something crashed."""
    rows: list[Row] = []

    def take(row: Row) -> None:
        rows.append(row)
        console.print(f"  {row.name}: {'skipped' if row.skipped else f'{row.value:.4g} {row.unit}'}", highlight=False)

    started = time.monotonic()
    good = registry.run(only, take)
    if not rows and good:
        console.print(f"no row matches {only!r}")
        return 2
    show(rows, console)
    if json_path is not None:
        write_json(rows, json_path)
    console.print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s")
    return 0 if good else 1


def _probe() -> Iterator[Row]:
    """How steady the machine is right now: a fixed piece of arithmetic, over and over."""
    import numpy as np

    a = np.ones((256, 256), dtype=np.float32)

    def once() -> float:
        started = time.perf_counter()
        for _ in range(20):
            a @ a
        return 1e3 * (time.perf_counter() - started)

    (samples,) = interleaved(50, once)
    yield samples.row("noise_matmul", "ms", reference="its own 10..90 % is the machine's noise")


registry = Registry()
registry.benchmark("noise_matmul")(_probe)
