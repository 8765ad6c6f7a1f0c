"""One page with plots of a run: as a picture, and as a file of HTML that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from cluster.simulator.records import Outcome, RequestRecord, RunResult
from cluster.simulator.report.schema import CacheOnlyReport, Report, Spread
from cluster.simulator.report.summary import waited_s

METADATA: Final = {"Software": None}
"""So that equal plots are equal bytes."""
TIERS: Final = ("device", "dram", "ssd", "remote")
WORKERS_SHOWN: Final = 16
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .8rem .25rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid; } img { max-width: 100%; background: #fff; }
h1 { font-size: 1.4rem; }
"""


def plot(report: Report, result: RunResult) -> bytes:
    """The run in six plots, PNG."""
    with _same_everywhere():
        figure = Figure(figsize=(13, 11), layout="constrained")
        axes: Any = figure.subplots(3, 2)
        done = [record for record in result.records if record.outcome is Outcome.COMPLETED]
        _ttft_over_time(axes[0][0], done, report.goodput.ttft_target_s)
        _cdf(axes[0][1], done, report)
        _hit_rate(axes[1][0], done)
        _loads(axes[1][1], report)
        _queues(axes[2][0], report)
        _replicas(axes[2][1], report)
        return _png(figure)


def plot_cache_only(report: CacheOnlyReport) -> bytes:
    """Hit rate against capacity, a line a policy, PNG."""
    with _same_everywhere():
        figure = Figure(figsize=(8, 5), layout="constrained")
        axis: Any = figure.subplots()
        for policy in dict.fromkeys(row.policy for row in report.rows):
            rows = [row for row in report.rows if row.policy == policy]
            axis.plot([row.capacity_blocks for row in rows], [row.token_hit_rate for row in rows], marker="o", label=policy)
        label = f"capacity, blocks of {report.block_tokens} tokens"
        axis.set(xlabel=label, ylabel="token hit rate", xscale="log", title=_plain(report.trace))
        axis.legend()
        return _png(figure)


def page(report: Report, picture: bytes) -> str:
    """The run's figures and its picture, as one HTML file."""
    run, cluster, tokens, good, work = report.run, report.cluster, report.tokens, report.goodput, report.work
    kind = "coupled " if cluster.colocated else ""
    title = f"{run.trace} x {run.speed:g}: {kind}{cluster.policy}, {cluster.prefill_workers}P + {cluster.decode_workers}D"
    outcomes = report.outcomes
    facts = [
        ("requests", f"{run.requests:,} in {run.duration_s:,.1f} s"),
        ("completed / rejected / rejected late / failed",
         f"{outcomes.completed:,} / {outcomes.rejected:,} / {outcomes.rejected_late:,} / {outcomes.failed:,}"),
        (f"goodput (TTFT <= {good.ttft_target_s:g} s, TBT <= {good.tbt_target_s:g} s)",
         f"{good.share:.1%}, {good.requests_per_s:.3f} requests/s"),
        ("token hit rate", f"{tokens.hit_rate:.1%} (" + ", ".join(f"{t} {tokens.hit_rate_by_tier[t]:.1%}" for t in TIERS) + ")"),
        ("tokens per second, in / out", f"{tokens.input_per_s:,.0f} / {tokens.output_per_s:,.0f}"),
        ("predicted TTFT, median error", "none" if report.prediction.error_p50 is None else f"{report.prediction.error_p50:.1%}"),
        ("computed for requests then turned away", f"{work.wasted_prefill_s:,.1f} s"),
        ("bytes moved", ", ".join(f"{way} {size / 1e9:,.1f} GB" for way, size in work.moved_bytes.items()) or "none"),
        ("hardware and model", cluster.profile),
        ("nodes", f"{cluster.dram_blocks_per_node:,} blocks of DRAM and {cluster.ssd_blocks_per_node:,} of SSD each"),
        ("admission, worker order, eviction, pulled copy, seed",
         f"{cluster.admission}, {cluster.order}, {cluster.eviction}, {cluster.pulled_copy}, {run.seed}"),
    ]  # fmt: skip
    latency = report.latency
    spreads = [
        ("TTFT", latency.ttft_s), ("TBT, all gaps", latency.tbt_s), ("TBT, worst tenth", latency.tbt_worst_tenth_s),
        ("end to end", latency.e2e_s), ("queue", latency.queue_s), ("load", latency.load_s), ("compute", latency.compute_s),
        ("handoff", latency.handoff_s),
    ]  # fmt: skip
    rows = [("seconds", "mean", "p50", "p90", "p99", "max"), *((name, *_shown(each)) for name, each in spreads)]
    parts = [_table(facts, head=False), _table(rows, head=True)]
    if outcomes.reasons:
        parts.append(
            _table([("not completed because", "requests"), *((w, f"{n:,}") for w, n in outcomes.reasons.items())], head=True)
        )
    return _html(title, parts, picture, "Six plots: time to first token, distributions, hit rate, load, queues, replicas")


def page_cache_only(report: CacheOnlyReport, picture: bytes) -> str:
    rows: list[tuple[str, ...]] = [("policy", "blocks", "token hit rate", "block hit rate", "evictions")]
    rows += [
        (row.policy, f"{row.capacity_blocks:,}", f"{row.token_hit_rate:.4f}", f"{row.block_hit_rate:.4f}", f"{row.evictions:,}")
        for row in report.rows
    ]
    return _html(f"{report.trace}: hit rates without time", [_table(rows, head=True)], picture, "Hit rate by capacity")


# --- plots ---------------------------------------------------------------------------------------------------------------


def _ttft_over_time(axis: Any, done: Sequence[RequestRecord], target_s: float) -> None:
    axis.scatter([r.arrived_s for r in done], [max(r.ttft_s or 0.0, 1e-3) for r in done], s=2, linewidths=0)
    axis.axhline(target_s, color="tab:red", linewidth=1)
    axis.set(xlabel="arrival, s", ylabel="TTFT, s", yscale="log", title="time to first token")


def _cdf(axis: Any, done: Sequence[RequestRecord], report: Report) -> None:
    for values, label in (
        ([r.ttft_s for r in done], "TTFT"),
        ([r.tbt_worst_tenth_s for r in done], "TBT, worst tenth"),
        ([waited_s(r) for r in done], "queue"),
    ):
        found = np.sort(np.array([v for v in values if v is not None]))
        if len(found):
            axis.plot(np.maximum(found, 1e-3), np.arange(1, len(found) + 1) / len(found), label=label)
    axis.axvline(report.goodput.ttft_target_s, color="tab:blue", linewidth=1, linestyle="--", label="TTFT target")
    axis.axvline(report.goodput.tbt_target_s, color="tab:orange", linewidth=1, linestyle="--", label="TBT target")
    axis.set(xlabel="seconds", ylabel="share of requests", xscale="log", title="how many within")
    axis.legend()


def _hit_rate(axis: Any, done: Sequence[RequestRecord]) -> None:
    if done:
        edges = np.linspace(0, max(r.arrived_s for r in done) + 1e-9, 61)
        place = np.clip(np.searchsorted(edges, [r.arrived_s for r in done], side="right") - 1, 0, 59)
        given = np.maximum(1, np.bincount(place, [r.input_tokens for r in done], 60))
        below = np.zeros(60)
        for tier in TIERS:
            share = np.bincount(place, [getattr(r, f"{tier}_tokens") for r in done], 60) / given
            axis.fill_between(edges[:-1], below, below + share, step="post", label=tier)
            below = below + share
        axis.legend()
    axis.set(xlabel="arrival, s", ylabel="share of input tokens", title="hit rate by tier")


def _loads(axis: Any, report: Report) -> None:
    times = [m.time_s for m in report.over_time]
    axis.plot(times, [m.prefill_load for m in report.over_time], label="prefill: queue / TTFT target")
    axis.plot(times, [m.decode_load for m in report.over_time], label="decode: step / TBT target")
    axis.set(xlabel="s", ylabel="load", title="load")
    axis.legend()


def _queues(axis: Any, report: Report) -> None:
    times = [m.time_s for m in report.over_time]
    shown = min(WORKERS_SHOWN, len(report.prefill_workers))
    for row in range(shown):
        axis.plot(times, [m.queue_tokens[row] / 1000 for m in report.over_time], linewidth=0.8)
    which = f"each of {shown}" if shown == len(report.prefill_workers) else f"the first {shown} of {len(report.prefill_workers)}"
    axis.set(xlabel="s", ylabel="thousand tokens", title=f"tokens left to compute, {which} prefill workers")


def _replicas(axis: Any, report: Report) -> None:
    times = [m.time_s for m in report.over_time]
    axis.plot(times, [m.replicas_mean for m in report.over_time], label="mean")
    axis.plot(times, [m.replicas_max for m in report.over_time], label="most")
    axis.set(xlabel="s", ylabel="nodes", title="replicas of the 100 most used blocks")
    axis.legend()


# --- output --------------------------------------------------------------------------------------------------------------


@contextmanager
def _same_everywhere() -> Iterator[None]:
    """Whatever style a person has set for their own plots: equal plots are equal bytes."""
    with mpl.rc_context():
        mpl.rcdefaults()
        yield


def _plain(text: str) -> str:
    """``text`` as it is: in a plot, dollar signs would make formulas."""
    return text.replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, metadata=METADATA)
    return buffer.getvalue()


def _shown(each: Spread) -> tuple[str, ...]:
    return tuple("" if v is None else f"{v:.4g}" for v in (each.mean, each.p50, each.p90, each.p99, each.max))


def _table(rows: Sequence[Sequence[str]], *, head: bool) -> str:
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for row, tag in ((row, "th" if head and i == 0 else "td") for i, row in enumerate(rows))
    ]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _html(title: str, parts: Sequence[str], picture: bytes, alt: str) -> str:
    image = base64.b64encode(picture).decode()
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{html.escape(title)}</h1>\n{body}\n"
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{image}">\n</body>\n</html>\n'
    )
