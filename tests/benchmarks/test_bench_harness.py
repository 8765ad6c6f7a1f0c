"""The harness: what is run, what is shown, when it fails. What it measures has no place here."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.figures import Row, Samples, Spread, at_least, at_most, crashed, skipped
from benchmarks.harness import Fixture, Registry, SkipBenchmark, interleaved
from benchmarks.noise import NoiseProbe
from benchmarks.report import main

pytestmark = pytest.mark.filterwarnings("error")


def run(registry: Registry, only: str | None = None, path: Path | None = None) -> tuple[int, str]:
    """Exit status and what was shown."""
    out = io.StringIO()
    status = main(registry, only, path, Console(file=out, width=240), NoiseProbe(size=1024))
    return status, out.getvalue()


def registry_of(*rows: Row, calls: list[str] | None = None) -> Registry:
    registry = Registry()
    for row in rows:

        @registry.benchmark(row.name)
        def measure(row: Row = row) -> Iterator[Row]:
            if calls is not None:
                calls.append(row.name)
            yield row

    return registry


def fixture(name: str, story: list[str], *, opens: Exception | None = None, closes: Exception | None = None) -> Fixture:
    @contextmanager
    def context() -> Iterator[str]:
        story.append(f"open {name}")
        if opens is not None:
            raise opens
        yield name
        story.append(f"close {name}")
        if closes is not None:
            raise closes

    return Fixture(name, context)


def using(registry: Registry, name: str, story: list[str], *needs: Fixture) -> None:
    @registry.benchmark(name, needs=needs)
    def measure(*given: str) -> Iterator[Row]:
        story.append(f"{name} with {','.join(given)}")
        yield Row(name, 1.0, "s")


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row("a", 5.0, "ms", target=at_most(5)), True),
        (Row("a", 5.1, "ms", target=at_most(5)), False),
        (Row("a", 0.95, "x", target=at_least(0.95)), True),
        (Row("a", 0.94, "x", target=at_least(0.95)), False),
        (Row("a", 100.0, "tok/s", ratio=0.5, target=at_least(0.7)), False),
        (Row("a", 0.1, "tok/s", ratio=0.8, target=at_least(0.7)), True),
        (Row("a", 0.1, "ms", ratio=0.8, target=at_most(0.7)), False),
        (Row("a", 30.0, "ms", reference=100.0, target=at_most(20)), False),
        (Row("a", 1.0, "tok/s"), None),
        (skipped("a", "no peer"), None),
        (crashed("a", "boom"), None),
    ],
)
def test_a_target_is_held_against_the_ratio_where_there_is_one(row: Row, holds: bool | None):
    assert row.holds is holds


@pytest.mark.parametrize(
    "figures", [{"value": math.nan}, {"value": 1.0, "ratio": math.inf}, {"value": 1.0, "reference": math.nan}]
)
def test_a_figure_that_is_not_finite_is_no_row(figures: dict[str, Any]):
    with pytest.raises(ValueError, match="finite"):
        Row("a", unit="s", **figures)


def test_a_median_needs_five_repeats_and_shows_their_spread():
    with pytest.raises(ValueError, match="4 repeats"):
        Samples((1.0,) * 4).row("a", "s")
    row = Samples(tuple(float(i) for i in range(11))).row("a", "s")
    assert (row.value, row.spread) == (5.0, Spread(1.0, 9.0))


def test_a_ratio_is_of_each_round_so_that_drift_cancels():
    ours, theirs = Samples((2.0, 4.0, 20.0, 2.0, 30.0)), Samples((1.0, 2.0, 10.0, 1.0, 10.0))
    row = ours.row_beside("a", "tok/s", theirs, "peer", target=at_least(2))
    assert (row.value, row.reference, row.ratio, row.holds) == (4.0, 2.0, 2.0, True)
    assert row.ratio_spread == Spread(2.0, 3.0)


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
def test_a_missed_target_is_the_exit_status(value: float, status: int):
    assert run(registry_of(Row("ttft_a", value, "ms", target=at_most(2))))[0] == status


def test_a_crash_is_shown_and_is_a_failure_and_the_rest_still_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    registry = Registry()

    @registry.benchmark("bad_first", "bad_second", "bad_third")
    def bad() -> Iterator[Row]:
        yield Row("bad_first", 1.0, "s")
        raise RuntimeError("boom")

    using(registry, "good", [])
    path = tmp_path / "rows.jsonl"
    status, shown = run(registry, "bad_(first|second)|good", path)
    rows = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert status == 1
    assert rows.keys() == {"bad_first", "bad_second", "good"}
    assert rows["bad_first"]["error"] is None
    assert rows["bad_second"]["error"] == "RuntimeError: boom"
    assert "crashed: RuntimeError: boom" in shown
    assert "boom" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[], [Row("other", 1.0, "s")]], ids=["missing", "unannounced"])
def test_rows_are_those_that_were_announced(rows: list[Row], capsys: pytest.CaptureFixture[str]):
    registry = Registry()
    registry.benchmark("announced")(lambda: rows)
    assert run(registry)[0] == 1
    assert "announced" in capsys.readouterr().err


def test_a_crash_after_the_last_row_still_fails(capsys: pytest.CaptureFixture[str]):
    registry = Registry()

    @registry.benchmark("late")
    def late() -> Iterator[Row]:
        yield Row("late", 1.0, "s")
        raise RuntimeError("boom")

    assert run(registry)[0] == 1
    assert "boom" in capsys.readouterr().err


def test_a_skip_is_shown_and_no_failure():
    registry = Registry()

    @registry.benchmark("prefill_a", "prefill_b")
    def measure() -> Iterator[Row]:
        yield Row("prefill_a", 1.0, "s")
        raise SkipBenchmark("no network")

    status, shown = run(registry)
    assert status == 0
    assert "skipped: no network" in shown


def test_only_starts_nothing_that_is_not_selected():
    story: list[str] = []
    cluster, peer = fixture("cluster", story), fixture("peer", story)
    registry = Registry()
    using(registry, "ttft_a", story, cluster)
    using(registry, "decode_b", story, peer)
    assert run(registry, "^decode_")[0] == 0
    assert story == ["open peer", "decode_b with peer", "close peer"]


def test_a_fixture_is_shared_and_closed_before_what_does_not_need_it():
    story: list[str] = []
    cluster, peer = fixture("cluster", story), fixture("peer", story)
    registry = Registry()
    using(registry, "a", story, cluster)
    using(registry, "b", story, cluster, peer)
    using(registry, "c", story)
    assert run(registry)[0] == 0
    assert story == [
        "open cluster", "a with cluster", "open peer", "b with cluster,peer", "close peer", "close cluster", "c with ",
    ]  # fmt: skip


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("no"), 1), (SkipBenchmark("no peer here"), 0)])
def test_what_does_not_open_is_tried_once(error: Exception, status: int, capsys: pytest.CaptureFixture[str]):
    story: list[str] = []
    peer = fixture("peer", story, opens=error)
    registry = Registry()
    using(registry, "a", story, peer)
    using(registry, "b", story, peer)
    assert run(registry)[0] == status
    assert story == ["open peer"]
    capsys.readouterr()


def test_what_does_not_close_is_a_failure(capsys: pytest.CaptureFixture[str]):
    registry = Registry()
    using(registry, "a", [], fixture("cluster", [], closes=RuntimeError("left something behind")))
    assert run(registry)[0] == 1
    assert "cluster did not close" in capsys.readouterr().err


def test_an_interrupt_closes_what_is_open_and_keeps_the_rows_so_far(tmp_path: Path):
    story: list[str] = []
    registry = Registry()
    using(registry, "a", story, cluster := fixture("cluster", story))

    @registry.benchmark("b", needs=[cluster])
    def interrupted(_: str) -> Iterator[Row]:
        raise KeyboardInterrupt
        yield

    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(registry, None, path)
    assert story[-1] == "close cluster"
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a"]


@pytest.mark.parametrize(("only", "path"), [("zzz", None), ("(", None), (None, Path("/nonexistent/rows.jsonl"))])
def test_what_cannot_be_run_says_so_before_anything_starts(only: str | None, path: Path | None):
    calls: list[str] = []
    status, shown = run(registry_of(Row("a", 1.0, "s"), calls=calls), only, path)
    assert (status, calls) == (2, [])
    assert shown.strip()


def test_json_lines_have_the_documented_fields(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    row = Row("a", 2.0, "ms", 4.0, "peer", 0.5, at_most(0.7), Spread(1.0, 3.0), Spread(0.4, 0.6))
    run(registry_of(row, skipped("b", "why")), None, path)
    first, second, noise = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "name": "a", "value": 2.0, "unit": "ms", "reference": 4.0, "ratio": 0.5, "target": "<= 0.7", "holds": True,
        "beside": "peer", "low": 1.0, "high": 3.0, "ratio_low": 0.4, "ratio_high": 0.6, "skipped": None, "error": None,
    }  # fmt: skip
    assert (second["skipped"], second["value"], second["holds"]) == ("why", None, None)
    assert noise["name"] == "noise_hash"
    assert noise["low"] <= noise["value"] <= noise["high"]


def test_the_noise_is_always_under_the_table():
    _, shown = run(registry_of(Row("a", 1.0, "s")), "^a$")
    assert "machine noise" in shown
    assert "noise_hash" not in shown


def test_names_are_unique():
    registry = registry_of(Row("a", 1.0, "s"))
    with pytest.raises(ValueError, match="named twice"):
        registry.benchmark("a")


def test_interleaved_takes_turns():
    order: list[str] = []

    def turn(name: str, value: float) -> float:
        order.append(name)
        return value

    assert interleaved(3, lambda: turn("a", 1.0), lambda: turn("b", 2.0)) == [[1.0] * 3, [2.0] * 3]
    assert order == ["a", "b"] * 3


TOPICS = re.compile(r"(ttft|overhead|handoff|prefill|decode|idle|ready|route|pool|remote|index|ssd|restart)_")


def test_the_projects_rows_begin_with_their_topic_and_benchmarks_of_a_fixture_are_neighbours():
    from benchmarks import (  # noqa: F401
        cluster_latency,
        engine_rates,
        idle_and_ready,
        index_rows,
        pool_rows,
        remote_rows,
        route_rows,
        ssd_rows,
        vllm_rates,
    )
    from benchmarks.harness import registry

    names = [name for benchmark in registry.benchmarks for name in benchmark.names]
    assert all(TOPICS.match(name) for name in names)
    assert {"ttft_warm_over_cold", "overhead_ttft_512", "handoff_exposed_1800", "idle_cpu", "ready_serve"} < set(names)
    closed: set[Any] = set()
    before: set[Any] = set()
    for benchmark in registry.benchmarks:
        needs = set(benchmark.needs)
        closed |= before - needs
        assert not {f.name for f in needs & closed} - {"engine"}, "a slow fixture would be opened twice"
        before = needs
