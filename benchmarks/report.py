"""What a run shows: a line per row as it comes, a table at the end, JSON lines in a file, and the exit status."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Row, Spread
from benchmarks.harness import Registry
from benchmarks.noise import NoiseProbe

GOOD: Final = 0
BAD: Final = 1
USAGE: Final = 2


def main(registry: Registry, only: str | None, json_path: Path | None, console: Console, noise: NoiseProbe | None = None) -> int:
    """Run, show, write. Exit status: 1 where a target does not hold or something crashed, 2 where nothing could be run."""
    try:
        wanted = re.compile(only or "")
    except re.error as error:
        console.print(f"not a regular expression: {only!r} ({error})", markup=False)
        return USAGE
    names = [NoiseProbe.NAME, *(name for benchmark in registry.benchmarks for name in benchmark.names)]
    if not any(wanted.search(name) for name in names):
        console.print(f"no row matches {only!r}", markup=False)
        return USAGE
    try:
        file = json_path.open("w") if json_path is not None else None
    except OSError as error:
        console.print(f"{json_path}: {error.strerror}", markup=False)
        return USAGE
    try:
        return GOOD if _run(registry, wanted, file, console, noise or NoiseProbe()) else BAD
    finally:
        if file is not None:
            file.close()


def _run(registry: Registry, wanted: re.Pattern[str], file: TextIO | None, console: Console, noise: NoiseProbe) -> bool:
    rows: list[Row] = []

    def take(row: Row) -> None:
        rows.append(row)
        console.print(f"  {row.name}: {_state(row)}", highlight=False, markup=False)
        if file is not None:  # at once: a run that is broken off keeps what it had
            file.write(json.dumps(row.to_json(), allow_nan=False) + "\n")
            file.flush()

    started = time.monotonic()
    good = registry.run(wanted, take, before_each=noise.sample)
    noise.sample()
    if wanted.search(noise.NAME):
        take(noise.row())
    console.print(table(rows))
    console.print(noise.summary(), highlight=False, markup=False)
    console.print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s", highlight=False)
    return good


def table(rows: list[Row]) -> Table:
    """One line a row."""
    made = Table(title="benchmarks")
    for column in ("row", "value", "10..90 %", "unit", "beside", "ratio", "10..90 %", "target", "holds"):
        made.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for row in rows:
        if not row.measured:
            made.add_row(row.name, "-", "", "", _state(row), "", "", "", "NO" if row.error else "")
            continue
        beside = row.beside if row.reference is None else f"{row.beside}: {row.reference:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {None: "", True: "yes", False: "NO"}[row.holds]
        made.add_row(
            row.name, f"{row.value:.4g}", _range(row.spread), row.unit, beside, ratio, _range(row.ratio_spread),
            str(row.target or ""), verdict,
        )  # fmt: skip
    return made


def _state(row: Row) -> str:
    if row.error:
        return f"crashed: {row.error}"
    return f"skipped: {row.skipped}" if row.skipped else f"{row.value:.4g} {row.unit}"


def _range(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.low:.4g}..{spread.high:.4g}"
