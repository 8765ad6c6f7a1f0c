"""From a run's records to its report. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from cluster.simulator.cluster import SimulationSettings
from cluster.simulator.records import Outcome, RequestRecord, RunResult
from cluster.simulator.report.schema import (
    SCHEMA_VERSION,
    Goodput,
    Latency,
    Moment,
    Outcomes,
    Prediction,
    Report,
    Run,
    Spread,
    Tokens,
    Work,
)
from cluster.simulator.trace import Trace


def summarise(
    trace: Trace, settings: SimulationSettings, result: RunResult, *, speed: float, ttft_target_s: float, tbt_target_s: float
) -> Report:  # fmt: skip
    """The report of one simulated run. ``speed`` says how many times as fast as recorded ``trace`` was replayed."""
    records = result.records
    done = [r for r in records if r.outcome is Outcome.COMPLETED]
    lasting_s = max(result.duration_s, 1e-9)
    scheduler = settings.scheduler
    run = Run(
        trace=trace.name, requests=len(records), speed=speed, profile=settings.profile.name,
        prefill_workers=len(result.prefill_workers), decode_workers=len(result.decode_workers), colocated=scheduler.colocated,
        dram_blocks_per_node=settings.dram_blocks, ssd_blocks_per_node=settings.ssd_blocks, block_tokens=result.block_tokens,
        policy=scheduler.policy, admission=scheduler.admission, order=settings.prefill_worker.order,
        eviction=settings.pool.eviction, seed=settings.seed, duration_s=_round(result.duration_s),
    )  # fmt: skip
    return Report(
        schema_version=SCHEMA_VERSION,
        run=run,
        outcomes=_outcomes(records),
        latency=_latency(done, result),
        goodput=_goodput(records, done, lasting_s, ttft_target_s, tbt_target_s),
        tokens=_tokens(done, lasting_s),
        work=_work(records, result, lasting_s),
        prediction=_prediction(result.prediction),
        prefill_workers=list(result.prefill_workers),
        decode_workers=list(result.decode_workers),
        nodes=list(result.nodes),
        over_time=[_moment(sample) for sample in result.samples],
        counters=dict(sorted(result.counters.items())),
    )


def spread(values: Iterable[float | None]) -> Spread:
    """Of the values that are there."""
    found = np.array([value for value in values if value is not None], np.float64)
    if not len(found):
        return Spread(count=0, mean=None, p50=None, p90=None, p99=None, max=None)
    p50, p90, p99 = (float(p) for p in np.percentile(found, [50, 90, 99]))
    return Spread(
        count=len(found), mean=_round(float(found.mean())), p50=_round(p50), p90=_round(p90), p99=_round(p99),
        max=_round(float(found.max())),
    )  # fmt: skip


def weighted_spread(values: np.ndarray, counts: np.ndarray) -> Spread:
    """Of sorted ``values``, each of which came ``counts`` times."""
    total = int(counts.sum())
    if not total:
        return spread(())
    upto = np.cumsum(counts)

    def at(share: float) -> float:
        return _round(float(values[int(np.searchsorted(upto, share * total))]))

    mean = float((values * counts).sum() / total)
    return Spread(count=total, mean=_round(mean), p50=at(0.5), p90=at(0.9), p99=at(0.99), max=_round(float(values[-1])))


def meets(record: RequestRecord, ttft_target_s: float, tbt_target_s: float) -> bool:
    """Whether a request is one of the goodput."""
    if record.outcome is not Outcome.COMPLETED or record.ttft_s is None or record.ttft_s > ttft_target_s:
        return False
    return record.tbt_worst_tenth_s is None or record.tbt_worst_tenth_s <= tbt_target_s


def _outcomes(records: list[RequestRecord]) -> Outcomes:
    counts = Counter(record.outcome for record in records)
    reasons = Counter(record.reason.split(":")[0] for record in records if record.outcome is not Outcome.COMPLETED)
    return Outcomes(
        completed=counts[Outcome.COMPLETED], rejected=counts[Outcome.REJECTED], rejected_late=counts[Outcome.REJECTED_LATE],
        failed=counts[Outcome.FAILED], reasons=dict(sorted(reasons.items())),
    )  # fmt: skip


def _latency(done: list[RequestRecord], result: RunResult) -> Latency:
    return Latency(
        ttft_s=spread(r.ttft_s for r in done),
        tbt_s=weighted_spread(result.gaps_s, result.gap_counts),
        tbt_worst_tenth_s=spread(r.tbt_worst_tenth_s for r in done),
        e2e_s=spread(None if r.finished_s is None else r.finished_s - r.arrived_s for r in done),
        queue_s=spread(r.queue_s for r in done),
        load_s=spread(r.load_s for r in done),
        compute_s=spread(r.compute_s for r in done),
        handoff_s=spread(r.handoff_s for r in done),
    )


def _goodput(
    records: list[RequestRecord], done: list[RequestRecord], lasting_s: float, ttft_s: float, tbt_s: float
) -> Goodput:  # fmt: skip
    count, infinite = max(1, len(records)), float("inf")
    good = sum(meets(record, ttft_s, tbt_s) for record in done)
    return Goodput(
        ttft_target_s=ttft_s, tbt_target_s=tbt_s, share=_round(good / count),
        ttft_share=_round(sum(meets(record, ttft_s, infinite) for record in done) / count),
        tbt_share=_round(sum(meets(record, infinite, tbt_s) for record in done) / count),
        requests_per_s=_round(good / lasting_s),
    )  # fmt: skip


def _tokens(done: list[RequestRecord], lasting_s: float) -> Tokens:
    given, made = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    tiers = {
        "device": sum(r.device_tokens for r in done),
        "dram": sum(r.dram_tokens for r in done),
        "ssd": sum(r.ssd_tokens for r in done),
        "remote": sum(r.remote_tokens for r in done),
    }
    cached = sum(tiers.values())
    return Tokens(
        input=given, output=made, cached=cached, hit_rate=_round(cached / max(1, given)),
        hit_rate_by_tier={tier: _round(tokens / max(1, given)) for tier, tokens in tiers.items()},
        input_per_s=_round(given / lasting_s), output_per_s=_round(made / lasting_s),
    )  # fmt: skip


def _work(records: list[RequestRecord], result: RunResult, lasting_s: float) -> Work:
    wasted = sum(r.compute_s or 0.0 for r in records if r.outcome is not Outcome.COMPLETED)
    busy = {worker: _round(seconds / lasting_s) for worker, seconds in result.busy_s.items()}
    return Work(busy_share=busy, moved_bytes=dict(sorted(result.moved_bytes.items())), wasted_prefill_s=_round(wasted))


def _prediction(view: dict[str, Any]) -> Prediction:
    p50, p90 = view.get("error_p50"), view.get("error_p90")
    return Prediction(
        count=view.get("count", 0), error_p50=None if p50 is None else _round(p50), error_p90=None if p90 is None else _round(p90)
    )  # fmt: skip


def _moment(sample: Any) -> Moment:
    replicas = sample.replicas
    return Moment(
        time_s=_round(sample.time_s), queue_tokens=list(sample.queue_tokens), batch=list(sample.batch),
        dram_blocks=list(sample.dram_blocks), ssd_blocks=list(sample.ssd_blocks), prefill_load=_round(sample.prefill_load),
        decode_load=_round(sample.decode_load), replicas_mean=_round(sum(replicas) / max(1, len(replicas))),
        replicas_max=max(replicas, default=0),
    )  # fmt: skip


def _round(value: float) -> float:
    return float(f"{value:.7g}")
