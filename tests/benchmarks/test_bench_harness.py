"""The harness: what is run, what is shown, when it fails. What it measures has no place here."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness import Registry, Row, Samples, at_least, at_most, interleaved, main, skipped


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def registry_of(*rows: Row, calls: list[str] | None = None) -> Registry:
    registry = Registry()
    for row in rows:

        @registry.benchmark(row.name)
        def measure(row: Row = row) -> Iterator[Row]:
            if calls is not None:
                calls.append(row.name)
            yield row

    return registry


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row("a", 5.0, "ms", target=at_most(5)), True),
        (Row("a", 5.1, "ms", target=at_most(5)), False),
        (Row("a", 0.95, "x", target=at_least(0.95)), True),
        (Row("a", 0.94, "x", target=at_least(0.95)), False),
        (Row("a", 100.0, "tok/s", ratio=0.5, target=at_least(0.7)), False),
        (Row("a", 1.0, "tok/s", ratio=0.8, target=at_least(0.7)), True),
        (Row("a", 1.0, "tok/s"), None),
        (skipped("a", "no peer"), None),
    ],
)
def test_a_target_is_held_against_the_ratio_where_there_is_one(row: Row, holds: bool | None):
    assert row.holds is holds


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
def test_a_missed_target_is_the_exit_status(value: float, status: int):
    registry = registry_of(Row("ttft_a", value, "ms", target=at_most(2)))
    assert main(registry, None, None, quiet()) == status


def test_a_crash_is_a_failure_and_the_rest_still_runs(capsys: pytest.CaptureFixture[str]):
    calls: list[str] = []
    registry = Registry()

    @registry.benchmark("bad")
    def bad() -> Iterator[Row]:
        raise RuntimeError("boom")
        yield

    @registry.benchmark("good")
    def good() -> Iterator[Row]:
        calls.append("good")
        yield Row("good", 1.0, "s")

    assert main(registry, None, None, quiet()) == 1
    assert calls == ["good"]
    assert "boom" in capsys.readouterr().err


def test_a_skip_is_no_failure():
    assert main(registry_of(skipped("prefill_peer", "no network")), None, None, quiet()) == 0


def test_only_runs_nothing_else_and_closes_what_was_opened():
    calls: list[str] = []
    registry = registry_of(Row("ttft_a", 1.0, "s"), Row("decode_b", 1.0, "s"), calls=calls)
    registry.closers.append(lambda: calls.append("closed"))
    assert main(registry, "^decode", None, quiet()) == 0
    assert calls == ["decode_b", "closed"]


def test_a_pattern_that_matches_nothing_says_so():
    assert main(registry_of(Row("a", 1.0, "s")), "zzz", None, quiet()) == 2


def test_json_lines_have_the_documented_fields(tmp_path: Path):
    path = tmp_path / "rows.json"
    rows = (Row("a", 2.0, "ms", "peer", 0.5, at_most(0.7), 1.0, 3.0), skipped("b", "why"))
    main(registry_of(*rows), None, path, quiet())
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "name": "a", "value": 2.0, "unit": "ms", "reference": "peer", "ratio": 0.5, "target": "<= 0.7", "holds": True,
        "low": 1.0, "high": 3.0, "skipped": None,
    }  # fmt: skip
    assert second["skipped"] == "why"
    assert second["value"] is None


def test_a_row_nobody_announced_is_a_crash(capsys: pytest.CaptureFixture[str]):
    registry = Registry()

    @registry.benchmark("announced")
    def measure() -> Iterator[Row]:
        yield Row("other", 1.0, "s")

    assert main(registry, None, None, quiet()) == 1
    assert "unannounced" in capsys.readouterr().err


def test_names_are_unique():
    registry = registry_of(Row("a", 1.0, "s"))
    with pytest.raises(ValueError, match="named twice"):
        registry.benchmark("a")


def test_interleaved_takes_turns():
    order: list[str] = []
    first, second = interleaved(3, lambda: order.append("a") or 1.0, lambda: order.append("b") or 2.0)
    assert order == ["a", "b"] * 3
    assert (first.median, second.median) == (1.0, 2.0)


def test_samples_show_their_spread():
    row = Samples(tuple(float(i) for i in range(1, 11))).row("a", "s")
    assert (row.value, row.low, row.high) == (5.5, 2.0, 10.0)
