"""From a run's records to its report. Pure.

Rates over requests are over all that arrived, so that turning requests away never looks like an improvement; latencies and token
hit rates are of those that completed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from cluster.simulator.cluster import SimulationSettings
from cluster.simulator.records import Outcome, RequestRecord, RunResult, Sample
from cluster.simulator.report.schema import (
    MOMENTS_MAX,
    SCHEMA_VERSION,
    Cluster,
    Goodput,
    Latency,
    Moment,
    Outcomes,
    Predicted,
    Prediction,
    Report,
    RequestRow,
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
        trace=trace.name, requests=len(records), speed=_round(speed), seed=settings.seed, duration_s=_round(result.duration_s)
    )  # fmt: skip
    cluster = Cluster(
        profile=settings.profile.name,
        prefill_workers=len(result.prefill_workers), decode_workers=len(result.decode_workers), colocated=scheduler.colocated,
        dram_blocks_per_node=settings.dram_blocks, ssd_blocks_per_node=settings.ssd_blocks, block_tokens=result.block_tokens,
        policy=scheduler.policy, balancing_threshold=scheduler.balancing_threshold, admission=scheduler.admission,
        order=settings.prefill_worker.order, eviction=settings.pool.eviction, pulled_copy=settings.pool.pulled_copy,
    )  # fmt: skip
    every = -(-len(result.samples) // MOMENTS_MAX) or 1
    return Report(
        schema_version=SCHEMA_VERSION,
        run=run,
        cluster=cluster,
        outcomes=_outcomes(records),
        latency=_latency(done, result),
        goodput=_goodput(records, done, lasting_s, ttft_target_s, tbt_target_s),
        tokens=_tokens(done, lasting_s),
        work=_work(records, result, lasting_s),
        prediction=_prediction(result.prediction),
        prefill_workers=list(result.prefill_workers),
        decode_workers=list(result.decode_workers),
        nodes=list(result.nodes),
        over_time=[_moment(sample) for sample in result.samples[::every]],
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


def waited_s(record: RequestRecord) -> float | None:
    """What of the time to first token is neither load nor compute: waiting before and after the load, and attempts that failed.
    Never below 0, where load and compute overlap."""
    if record.ttft_s is None or record.compute_s is None:
        return None
    return max(0.0, record.ttft_s - (record.load_s or 0.0) - record.compute_s)


def request_row(record: RequestRecord, ttft_target_s: float, tbt_target_s: float) -> RequestRow:
    """A request's line in ``requests.jsonl``."""
    terms = record.predicted
    return RequestRow(
        index=record.index, request_id=record.request_id, request_class=record.request_class, session=record.session,
        arrived_s=_round(record.arrived_s), input_tokens=record.input_tokens, output_tokens=record.output_tokens,
        outcome=record.outcome.value, reason=record.reason, good=meets(record, ttft_target_s, tbt_target_s),
        attempts=record.attempts, prefill_worker=record.prefill_worker, decode_worker=record.decode_worker,
        predicted=None if terms is None else Predicted(
            ttft_s=_round(terms.ttft_s), queue_s=_round(terms.queue_s), load_s=_round(terms.load_s),
            compute_s=_round(terms.compute_s), handoff_s=_round(terms.handoff_s), overlap_s=_round(terms.overlap_s),
        ),
        ttft_s=_maybe(record.ttft_s), e2e_s=_maybe(_e2e_s(record)),
        queue_s=_maybe(waited_s(record)), load_s=_maybe(record.load_s), compute_s=_maybe(record.compute_s),
        handoff_s=_maybe(record.handoff_s), tbt_mean_s=_maybe(record.tbt_mean_s), tbt_p99_s=_maybe(record.tbt_p99_s),
        tbt_max_s=_maybe(record.tbt_max_s), tbt_worst_tenth_s=_maybe(record.tbt_worst_tenth_s),
        cached_tokens=record.cached_tokens, device_tokens=record.device_tokens, dram_tokens=record.dram_tokens,
        ssd_tokens=record.ssd_tokens, remote_tokens=record.remote_tokens,
    )  # fmt: skip


def meets(record: RequestRecord, ttft_target_s: float, tbt_target_s: float) -> bool:
    """Whether a request is one of the goodput."""
    if record.outcome is not Outcome.COMPLETED or record.ttft_s is None or record.ttft_s > ttft_target_s:
        return False
    return record.tbt_worst_tenth_s is None or record.tbt_worst_tenth_s <= tbt_target_s


def _outcomes(records: list[RequestRecord]) -> Outcomes:
    counts = Counter(record.outcome for record in records)
    reasons = Counter(_kind(record.reason) for record in records if record.outcome is not Outcome.COMPLETED)
    return Outcomes(
        completed=counts[Outcome.COMPLETED], rejected=counts[Outcome.REJECTED], rejected_late=counts[Outcome.REJECTED_LATE],
        failed=counts[Outcome.FAILED], reasons=dict(sorted(reasons.items())),
    )  # fmt: skip


def _latency(done: list[RequestRecord], result: RunResult) -> Latency:
    return Latency(
        ttft_s=spread(r.ttft_s for r in done),
        tbt_s=weighted_spread(result.gaps_s, result.gap_counts),
        tbt_worst_tenth_s=spread(r.tbt_worst_tenth_s for r in done),
        e2e_s=spread(_e2e_s(r) for r in done),
        queue_s=spread(waited_s(r) for r in done),
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
    return Prediction(
        count=view.get("count", 0), error_p50=_maybe(view.get("error_p50")), error_p90=_maybe(view.get("error_p90"))
    )  # fmt: skip


def _moment(sample: Sample) -> Moment:
    replicas = sample.replicas
    return Moment(
        time_s=_round(sample.time_s), queue_tokens=list(sample.queue_tokens), batch=list(sample.batch),
        dram_blocks=list(sample.dram_blocks), ssd_blocks=list(sample.ssd_blocks), prefill_load=_round(sample.prefill_load),
        decode_load=_round(sample.decode_load), replicas_mean=_round(sum(replicas) / max(1, len(replicas))),
        replicas_max=max(replicas, default=0),
    )  # fmt: skip


def _e2e_s(record: RequestRecord) -> float | None:
    return None if record.finished_s is None else record.finished_s - record.arrived_s


def _kind(reason: str) -> str:
    """What reasons that differ in figures only have in common."""
    return re.sub(r"\d+([.,]\d+)*", "#", reason.split(":")[0])


def _maybe(value: float | None) -> float | None:
    return None if value is None else _round(value)


def _round(value: float) -> float:
    return float(f"{value:.7g}")
