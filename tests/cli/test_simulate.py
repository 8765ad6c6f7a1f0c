"""``moonpool simulate`` as people run it, on small inputs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.simulator.report.schema import CacheOnlyReport, Report, RequestRow
from scheduler.admission.classes import parse_classes

CUT = str(Path(__file__).parent.parent / "data" / "conversation_cut.jsonl")
SMALL = ["simulate", "--trace", CUT, "--limit", "60", "--prefill", "2", "--decode", "2", "--dram-blocks", "600"]


def run(*words: str):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, list(words))


def test_a_run_writes_its_report_and_equal_runs_equal_bytes(tmp_path: Path):
    outs = [tmp_path / name for name in ("a", "b")]
    for out in outs:
        done = run(*SMALL, "--policy", "random", "--seed", "3", "--slo-ttft", "300", "--out", str(out))
        assert done.exit_code == 0, done.output
        assert "60 of 60 completed" in done.output
    names = ["report.html", "report.json", "report.png", "requests.jsonl"]
    assert [sorted(path.name for path in out.iterdir()) for out in outs] == [names, names]
    assert [(outs[0] / name).read_bytes() for name in names] == [(outs[1] / name).read_bytes() for name in names]
    report = Report.model_validate_json((outs[0] / "report.json").read_text())
    rows = [json.loads(line) for line in (outs[0] / "requests.jsonl").read_text().splitlines()]
    assert report.cluster.policy == "random"
    assert report.outcomes.completed == len(rows) == 60
    assert report.tokens.input == sum(row["input_tokens"] for row in rows)
    assert report.tokens.cached == sum(row["cached_tokens"] for row in rows)
    tiers = [f"{tier}_tokens" for tier in ("device", "dram", "ssd", "remote")]
    assert all(row["cached_tokens"] == sum(row[tier] for tier in tiers) for row in rows)
    ttft = sorted(row["ttft_s"] for row in rows)
    assert report.latency.ttft_s.mean == pytest.approx(sum(ttft) / 60, rel=1e-5)
    assert report.latency.tbt_s.count == sum(row["output_tokens"] - 1 for row in rows)
    good = sum(row["ttft_s"] <= 300 and (row["tbt_worst_tenth_s"] or 0) <= 0.1 for row in rows)
    assert report.goodput.share == pytest.approx(good / 60, rel=1e-5)
    lines = [RequestRow.model_validate(row) for row in rows]
    assert sum(line.good for line in lines) == good
    for line in lines:
        assert line.ttft_s is not None
        assert line.queue_s is not None
        assert line.load_s is not None
        assert line.compute_s is not None
        assert line.queue_s + line.load_s + line.compute_s == pytest.approx(line.ttft_s, rel=1e-5)
    assert str(tmp_path) not in (outs[0] / "report.html").read_text() + (outs[0] / "report.json").read_text()
    assert [m.time_s for m in report.over_time[:3]] == [0.0, 10.0, 20.0]


def test_the_page_needs_nothing_else(tmp_path: Path):
    run(*SMALL, "--out", str(tmp_path / "out"))
    seen: list[tuple[str, str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.extend((tag, value or "") for name, value in attrs if name in ("src", "href"))

    text = (tmp_path / "out" / "report.html").read_text()
    Reader().feed(text)
    assert [(tag, value[:22]) for tag, value in seen] == [("img", "data:image/png;base64,")]
    assert "TTFT" in text
    assert "2P + 2D" in text


def test_without_time_there_are_hit_rates(tmp_path: Path):
    done = run(
        "simulate", "--trace", CUT, "--cache-only", "--policy", "lru,belady", "--capacity-blocks", "3000,500",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = CacheOnlyReport.model_validate_json((tmp_path / "out" / "report.json").read_text())
    found = {(row.policy, row.capacity_blocks): row.block_hits for row in report.rows}
    assert found == {("lru", 500): 599, ("lru", 3000): 1026, ("belady", 500): 1799, ("belady", 3000): 2775}
    assert "lru" in done.output


def test_turned_away_requests_count_and_are_named_by_kind(tmp_path: Path):
    done = run(
        "simulate", "--trace", CUT, "--limit", "100", "--prefill", "1", "--decode", "1", "--dram-blocks", "600", "--speed", "4",
        "--admission", "none", "--slo-ttft", "10", "--slo-tbt", "0.031", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    outcomes = report.outcomes
    assert outcomes.completed + outcomes.rejected + outcomes.rejected_late + outcomes.failed == report.run.requests == 100
    late = {reason: count for reason, count in outcomes.reasons.items() if "#" in reason}
    assert list(late.values()) == [outcomes.rejected_late], "seconds of a step differ, the kind does not"
    assert outcomes.reasons == late | {"the first token would be too late": outcomes.rejected}
    assert min(outcomes.reasons.values()) > 0
    assert report.work.wasted_prefill_s > 0
    assert report.goodput.share <= outcomes.completed / 100


def test_a_run_in_which_nothing_completes_is_reported_too(tmp_path: Path):
    done = run(
        "simulate", "--trace", CUT, "--limit", "3", "--prefill", "1", "--decode", "1", "--dram-blocks", "1",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "0 of 3 completed; mean TTFT none s" in done.output
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    assert report.latency.ttft_s.mean is None
    assert report.goodput.share == 0.0


WRONG = {
    "an unknown policy": (
        ["--policy", "best"],
        r"--policy: .*'random', 'round_robin', 'least_loaded', 'local_cache_aware', 'mooncake'",
    ),
    "an unknown gate": (["--admission", "late"], r"--admission: .*'none', 'early' or 'predictive'"),
    "an unknown order": (["--order", "lifo"], "--order: "),
    "an unknown eviction": (["--eviction", "clock"], "--eviction: .*'lru'"),
    "an unknown profile": (["--profile", "abacus"], "profile: there is no 'abacus'; known are: llama-3.1-8b-h100"),
    "an unknown cache policy": (["--cache-only", "--policy", "clock"], "--policy: there is no 'clock'; known are: lru, lfu"),
    "no capacity": (["--cache-only", "--capacity-blocks", "10,x"], "--capacity-blocks: '10,x' is not a list of whole numbers"),
    "no such trace": (["--trace", "/nowhere.jsonl"], "--trace: /nowhere.jsonl: No such file"),
    "no target of the first token": (["--slo-ttft", "inf"], "--slo-ttft"),
    "no target of the gaps": (["--slo-tbt", "nan"], "--slo-tbt"),
    "no speed": (["--speed", "0"], "--speed"),
    "no worker": (["--prefill", "0"], "--prefill"),
    "a journal that is none": (["--journal", CUT], "--journal: not a scheduler's journal"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line_and_leaves_nothing(what: str, tmp_path: Path):
    words, message = WRONG[what]
    done = run(*SMALL, *words, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    if "Usage:" not in done.output:  # what typer itself finds comes in its own frame
        assert len(done.output.strip().splitlines()) == 1, done.output
    assert re.search(message, done.output), done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"a: [\n", b"\xff\xfe", b"name: x\nnic: 3\n", b"- 1\n"])
def test_a_bad_profile_is_one_line(text: bytes, tmp_path: Path):
    profile = tmp_path / "mine.yaml"
    profile.write_bytes(text)
    done = run(*SMALL, "--profile", str(profile), "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert re.fullmatch(r".*profile.*mine\.yaml: .*\n", done.output), done.output
    assert list(tmp_path.iterdir()) == [profile]


def test_a_target_is_passed_on_to_the_last_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr("cluster.cli.simulate._timed", lambda _traffic, settings, *_rest: seen.append(settings.scheduler.classes))
    for ttft, tbt in (("12345.678901", "0.001"), ("86400", "86400"), ("0.0015", "0.1")):
        words = ["--limit", "2", "--slo-ttft", ttft, "--slo-tbt", tbt, "--out", str(tmp_path / "out")]
        done = run("simulate", "--trace", CUT, *words)
        assert done.exit_code == 0, done.output
        found = parse_classes(seen[-1])["default"]
        assert (found.ttft_s, found.tpot_s) == (float(ttft), float(tbt))


def test_a_bad_line_is_named(tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    good = Path(CUT).read_text().splitlines()[:3]
    bad.write_text("\n".join([*good, good[0].replace('"input_length"', '"length"')]) + "\n")
    done = run("simulate", "--trace", str(bad), "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "bad.jsonl:4: input_length: is missing" in done.output


def test_a_folder_that_is_not_ours_is_not_replaced(tmp_path: Path):
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("x")
    done = run(*SMALL, "--out", str(out))
    assert done.exit_code == 2
    assert "will not be replaced" in done.output
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    again = tmp_path / "ours"
    for _ in range(2):
        assert run("simulate", "--trace", CUT, "--limit", "5", "--cache-only", "--out", str(again)).exit_code == 0


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.simulator.cluster.simulate", lambda *_args, **_more: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for out in (str(tmp_path / "file" / "out"), ".", "..", str(tmp_path / "file")):
        done = run(*SMALL, "--out", out)
        assert done.exit_code == 2, done.output
        assert done.output.startswith("--out: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "here"]
    assert list(here.iterdir()) == []
