"""From records to a report: figures that can be checked by hand."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from cluster.simulator.cluster import SimulationSettings
from cluster.simulator.profile import load_profile
from cluster.simulator.records import Outcome, RequestRecord, RunResult, Sample
from cluster.simulator.report import files
from cluster.simulator.report.files import OutputError, check_folder, write_folder
from cluster.simulator.report.page import page, page_cache_only, plot, plot_cache_only
from cluster.simulator.report.reference import render
from cluster.simulator.report.schema import MOMENTS_MAX, SCHEMA_VERSION, CacheOnlyReport, CacheOnlyRow, Report
from cluster.simulator.report.summary import request_row, spread, summarise, weighted_spread
from cluster.simulator.trace import Trace
from scheduler.plan import PlanTerms

REPOSITORY = Path(__file__).parent.parent.parent
TERMS = PlanTerms(queue_s=1.0, load_s=0.5, compute_s=2.0, handoff_s=0.25, overlap_s=0.5)
SETTINGS = SimulationSettings(load_profile("local"), 2, 1, 100)


def record(index: int, **more: object) -> RequestRecord:
    """Completed: 1,000 tokens in, 10 out; first token after 2 s of which 0.5 s were load and 1.2 s compute."""
    made = RequestRecord(
        index, f"r{index}", "", None, float(index), 1000, 10, Outcome.COMPLETED, attempts=1, predicted=TERMS, queue_s=0.0,
        load_s=0.5, compute_s=1.2, handoff_s=0.1, ttft_s=2.0, finished_s=index + 3.0, tbt_mean_s=0.1, tbt_p99_s=0.2,
        tbt_max_s=0.2, tbt_worst_tenth_s=0.2,
    )  # fmt: skip
    for name, value in more.items():
        setattr(made, name, value)
    return made


def moment(time_s: float) -> Sample:
    return Sample(time_s, (5, 7), (3,), (10, 20, 30), (0, 0, 0), 0.5, 0.25, (1, 2, 3))


def result(records: list[RequestRecord], *, samples: int = 3, duration_s: float = 10.0) -> RunResult:
    return RunResult(
        records, [moment(10.0 * at) for at in range(samples)], ("prefill-0", "prefill-1"), ("decode-0",), ("a", "b", "c"),
        duration_s, 512, np.array([0.1, 0.2]), np.array([8, 2]), {"network": 7, "local": 3}, {"prefill-0": 5.0, "decode-0": 1.0},
    )  # fmt: skip


def report(records: list[RequestRecord], *, ttft: float = 2.0, tbt: float = 0.2, **more: int) -> Report:
    trace = Trace("handmade", 512, ())
    return summarise(trace, SETTINGS, result(records, **more), speed=1.0, ttft_target_s=ttft, tbt_target_s=tbt)


def turned_away(index: int, outcome: Outcome, reason: str, **more: object) -> RequestRecord:
    nothing = dict.fromkeys(("predicted", "load_s", "compute_s", "handoff_s", "ttft_s", "tbt_worst_tenth_s"))
    return record(index, outcome=outcome, reason=reason, **(nothing | more))


# --- figures -----------------------------------------------------------------------------------------------------------------


def test_goodput_is_of_all_that_arrived_and_its_limits_belong_to_it():
    rows = [
        record(0),  # on both limits
        record(1, ttft_s=2.001),
        record(2, tbt_worst_tenth_s=0.201),
        record(3, tbt_worst_tenth_s=None),  # one token: it has no gaps
        turned_away(4, Outcome.REJECTED, "too late"),
        turned_away(5, Outcome.FAILED, "lost", ttft_s=0.1, tbt_worst_tenth_s=0.1),  # soon, but never finished
        turned_away(6, Outcome.REJECTED_LATE, "a step takes 0.3 s", compute_s=4.0),
        record(7, ttft_s=9.0, tbt_worst_tenth_s=9.0),
    ]
    found = report(rows).goodput
    assert (found.share, found.ttft_share, found.tbt_share) == (2 / 8, 3 / 8, 3 / 8)
    assert found.requests_per_s == 0.2
    assert [request_row(row, 2.0, 0.2).good for row in rows] == [True, False, False, True, False, False, False, False]


def test_hit_rates_are_of_tokens_and_not_of_requests():
    rows = [
        record(0, input_tokens=9000, dram_tokens=512, remote_tokens=256),
        record(1, input_tokens=1000, ssd_tokens=232),
        turned_away(2, Outcome.FAILED, "lost", dram_tokens=512),
    ]
    tokens = report(rows).tokens
    assert (tokens.input, tokens.output, tokens.cached, tokens.hit_rate) == (10_000, 20, 1000, 0.1)
    assert tokens.hit_rate_by_tier == {"device": 0.0, "dram": 0.0512, "ssd": 0.0232, "remote": 0.0256}
    assert (tokens.input_per_s, tokens.output_per_s) == (1000.0, 2.0)


def test_the_parts_of_the_first_token_add_up():
    latency = report([record(0), record(1, ttft_s=5.0, compute_s=4.0, load_s=2.0)]).latency
    assert latency.ttft_s.mean == 3.5
    assert latency.queue_s.max == pytest.approx(0.3)  # 2 - 0.5 - 1.2; the other's load and compute overlapped
    assert latency.queue_s.p50 == pytest.approx(0.15)
    assert (latency.e2e_s.mean, latency.e2e_s.count) == (3.0, 2)


def test_what_was_turned_away_is_told_by_kind_whatever_its_figures():
    rows = [turned_away(at, Outcome.REJECTED_LATE, f"a step takes 0.{at:03} s", compute_s=1.5) for at in range(50)]
    rows += [turned_away(50, Outcome.FAILED, "prefill-003 went silent: twice"), record(51)]
    found = report(rows)
    assert found.outcomes.reasons == {"a step takes # s": 50, "prefill-# went silent": 1}
    assert (found.outcomes.completed, found.outcomes.rejected_late, found.outcomes.failed) == (1, 50, 1)
    assert found.work.wasted_prefill_s == 75.0
    assert request_row(rows[3], 1, 1).reason == "a step takes 0.003 s"


def test_work_and_the_cluster_over_time():
    found = report([record(0)])
    assert found.work.busy_share == {"prefill-0": 0.5, "decode-0": 0.1}
    assert list(found.work.moved_bytes) == ["local", "network"]
    assert [each.time_s for each in found.over_time] == [0.0, 10.0, 20.0]
    assert (found.over_time[0].replicas_mean, found.over_time[0].replicas_max) == (2.0, 3)


def test_a_long_run_has_no_more_than_so_many_moments():
    for samples in (MOMENTS_MAX, MOMENTS_MAX + 1, 10 * MOMENTS_MAX):
        times = [each.time_s for each in report([record(0)], samples=samples).over_time]
        assert MOMENTS_MAX / 2 < len(times) <= MOMENTS_MAX
        assert times == sorted(times)


def test_nothing_at_all_is_reported_as_nothing():
    found = report([])
    assert found.latency.ttft_s.model_dump() == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    assert (found.goodput.share, found.tokens.hit_rate) == (0.0, 0.0)
    assert report([record(0)], duration_s=0).goodput.share == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_spreads_of_counted_values_are_those_of_all_the_values(seed: int):
    drawn = random.Random(seed)
    values = np.array(sorted({drawn.randrange(1, 1000) / 1e4 for _ in range(drawn.randrange(1, 60))}))
    counts = np.array([drawn.randrange(1, 50) for _ in values])
    every = np.repeat(values, counts)
    found, plain = weighted_spread(values, counts), spread(every.tolist())
    assert (found.count, found.mean, found.max) == (plain.count, pytest.approx(plain.mean), plain.max)
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):  # the lowest value that so many are within
        assert getattr(found, name) == pytest.approx(float(np.percentile(every, share, method="inverted_cdf")))


# --- files -------------------------------------------------------------------------------------------------------------------


def test_the_written_schema_is_that_of_the_models_and_holds_for_what_is_written(tmp_path: Path):
    text = (REPOSITORY / "docs" / "report.schema.json").read_text()
    assert text == render(), "run: python -m cluster.simulator.report.reference"
    target = tmp_path / "again.json"
    subprocess.run(
        [sys.executable, "-m", "cluster.simulator.report.reference", str(target)], cwd=REPOSITORY, check=True, timeout=60
    )
    assert target.read_text() == text
    jsonschema = pytest.importorskip("jsonschema")  # it comes with ray
    schema = json.loads(text)
    rows = [record(0), turned_away(1, Outcome.REJECTED, "no")]
    for name, made in (
        ("Report", report(rows)), *(("RequestRow", request_row(row, 1.0, 1.0)) for row in rows), ("CacheOnlyReport", HIT_RATES),
    ):  # fmt: skip
        jsonschema.validate(json.loads(made.model_dump_json()), {"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]})
    silent = [name for name, each in schema["$defs"].items() if "description" not in each]
    assert silent == []


HIT_RATES = CacheOnlyReport(
    schema_version=SCHEMA_VERSION,
    trace="<cost $5 & $6>",
    requests=3,
    block_tokens=512,
    rows=[
        CacheOnlyRow(
            policy=policy,
            capacity_blocks=size,
            block_references=9,
            block_hits=3,
            block_hit_rate=0.3,
            token_hit_rate=0.25,
            evictions=1,
        )
        for policy in ("lru", "belady")
        for size in (10, 100)
    ],
)


class Tags(HTMLParser):
    """What is open at the end, and everything that a browser would fetch."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.images = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag == "img":
            self.images += 1
            assert given["alt"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("kind", ["some", "none", "one token", "no time"])
def test_the_page_is_whole_and_fetches_nothing(kind: str):
    rows = {
        "some": [record(0), record(1), turned_away(2, Outcome.FAILED, "<b>&</b>")],
        "none": [turned_away(0, Outcome.REJECTED, "no")],
    }
    if kind == "no time":
        text = page_cache_only(HIT_RATES, plot_cache_only(HIT_RATES))
        assert "&lt;cost $5 &amp; $6&gt;" in text
    else:
        records = rows.get(kind, [record(0, tbt_worst_tenth_s=None)])
        found = report(records)
        text = page(found, plot(found, result(records)))
        assert ("&lt;b&gt;&amp;&lt;/b&gt;" in text) == (kind == "some")
        assert "2P + 1D" in text
    tags = Tags(text)
    assert tags.open == []
    assert tags.images == 1
    assert all(each.startswith("data:image/png;base64,") for each in tags.fetched)
    assert "color-scheme: light dark" in text
    assert "<script" not in text
    assert "url(" not in text


def test_a_persons_own_plot_style_changes_no_byte():
    plain = plot_cache_only(HIT_RATES)
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.dpi": 300}):
        assert plot_cache_only(HIT_RATES) == plain
        assert mpl.rcParams["font.size"] == 30
    rows = [HIT_RATES.rows[0].model_copy(update={"token_hit_rate": 0.9}), *HIT_RATES.rows[1:]]
    assert plot_cache_only(HIT_RATES.model_copy(update={"rows": rows})) != plain


def test_an_earlier_report_stays_where_the_new_one_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    write_folder(out, {"report.json": b"1", "old": b""})
    write_folder(out, {"report.json": b"2"})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"report.json": b"2"}

    def full(_self: Path, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "write_bytes", full)
        with pytest.raises(OutputError, match="No space left"):
            write_folder(out, {"report.json": b"3"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if target == out and not self.name.endswith(".before"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "rename", refused)
        with pytest.raises(OutputError, match="Input/output error"):
            write_folder(out, {"report.json": b"3"})
    assert (out / "report.json").read_bytes() == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    write_folder(link, {"report.json": b"1"})
    assert link.is_symlink()
    assert (real / "report.json").read_bytes() == b"1"


def test_missing_folders_above_are_made_and_checking_makes_none(tmp_path: Path):
    out = tmp_path / "a" / "b" / "c"
    check_folder(out)
    assert list(tmp_path.iterdir()) == []
    write_folder(out, {"report.json": b"1"})
    assert [path.name for path in out.iterdir()] == ["report.json"]
