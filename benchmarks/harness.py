"""The registry of benchmarks, what they need open, and how they are run. Knows nothing of what is measured.

A benchmark announces its rows and the fixtures it needs (a cluster, a peer). It runs only when one of its rows is wanted; a
fixture opens when the first benchmark that runs needs it and closes before the first that does not, so that nothing measured
shares the machine with what another benchmark left running. Benchmarks of one fixture therefore stand next to each other.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.figures import Row, crashed, skipped

REASON_CHARS_MAX: Final = 300


class SkipBenchmark(Exception):  # noqa: N818 - no error: the benchmark cannot run here, and the text says why
    """Raised by a benchmark or a fixture that has no place on this machine."""


@dataclass(frozen=True, eq=False, slots=True)
class Fixture:
    """Something that benchmarks share: ``open()`` is entered once and left once."""

    name: str
    open: Callable[[], AbstractContextManager[Any]]


Measure = Callable[..., Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``measure`` is called with the opened ``needs``, in their order, and makes the rows ``names``."""

    names: tuple[str, ...]
    needs: tuple[Fixture, ...]
    measure: Measure


@dataclass
class Registry:
    benchmarks: list[Benchmark] = field(default_factory=list)

    def benchmark(self, *names: str, needs: Iterable[Fixture] = ()) -> Callable[[Measure], Measure]:
        """Decorator: the function measures the rows ``names``. Raises ValueError for a name that is taken."""
        taken = {name for known in self.benchmarks for name in known.names}
        if clash := taken & set(names):
            raise ValueError(f"benchmark rows named twice: {sorted(clash)}")

        def add(measure: Measure) -> Measure:
            self.benchmarks.append(Benchmark(names, tuple(needs), measure))
            return measure

        return add

    def run(
        self, wanted: re.Pattern[str], on_row: Callable[[Row], None], *, before_each: Callable[[], None] = lambda: None
    ) -> bool:
        """Run what ``wanted`` finds in row names. Returns False where a row is not good or a fixture did not close."""
        good = True

        def take(row: Row) -> None:
            nonlocal good
            on_row(row)
            good &= row.good

        fixtures = _OpenFixtures()
        try:
            for benchmark in self.benchmarks:
                if any(wanted.search(name) for name in benchmark.names):
                    good &= fixtures.close_all_but(benchmark.needs)
                    before_each()
                    _run_one(benchmark, wanted, fixtures, take)
        finally:
            good &= fixtures.close_all_but(())
        return good


class _OpenFixtures:
    """What is open now. What failed to open is not tried again in this run: it may have taken minutes."""

    def __init__(self) -> None:
        self._open: dict[Fixture, tuple[AbstractContextManager[Any], Any]] = {}
        self._failed: dict[Fixture, Exception] = {}

    def get(self, fixture: Fixture) -> Any:
        if fixture in self._failed:
            raise self._failed[fixture]
        if fixture not in self._open:
            try:
                context = fixture.open()
                self._open[fixture] = (context, context.__enter__())
            except Exception as error:
                self._failed[fixture] = error
                raise
        return self._open[fixture][1]

    def close_all_but(self, needed: Iterable[Fixture]) -> bool:
        """The last opened goes first. Returns False where one did not close."""
        kept = set(needed)
        good = True
        for fixture in [f for f in reversed(self._open) if f not in kept]:
            context, _ = self._open.pop(fixture)
            try:
                context.__exit__(None, None, None)
            except Exception:
                traceback.print_exc()
                print(f"{fixture.name} did not close", file=sys.stderr)
                good = False
        return good


def _run_one(benchmark: Benchmark, wanted: re.Pattern[str], fixtures: _OpenFixtures, take: Callable[[Row], None]) -> None:
    """Every wanted row of the benchmark is taken exactly once: measured, skipped, or crashed."""
    missing = [name for name in benchmark.names if wanted.search(name)]
    try:
        for row in benchmark.measure(*[fixtures.get(fixture) for fixture in benchmark.needs]):
            if row.name not in benchmark.names:
                raise ValueError(f"row {row.name} was not announced")
            if row.name in missing:
                missing.remove(row.name)
                take(row)
        if missing:
            raise ValueError(f"announced and not measured: {', '.join(missing)}")
    except SkipBenchmark as reason:
        for name in missing:
            take(skipped(name, str(reason)))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        for name in missing:
            take(crashed(name, text))
        if not missing:  # it crashed after its last row: those rows stand, and yet something is wrong
            take(crashed(benchmark.names[0] + "_after", text))


def interleaved(repeats: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Run all ``measures`` in turn, ``repeats`` times: what the machine does meanwhile hits all of them alike. One list each."""
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]


registry: Final = Registry()
"""All benchmarks of this project; importing the modules that measure fills it, in the order in which they run."""
