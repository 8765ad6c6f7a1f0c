"""What ``/metrics`` shows. Labels are few and their values bounded: no request id, no text, nothing that a client chooses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.gateway.inflight import InFlight, Timing

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ERROR_BUCKETS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TBT_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
REQUEST_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PHASE_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class GatewayMetrics:
    """One registry per gateway: nothing here is process-global."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "moonpool_gateway_{}".format
        self.requests = Counter(
            name("requests"), "HTTP requests by route and outcome (ok, client_gone, or the status).", ["route", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge(name("answers_in_flight"), "Answers in work.", registry=registry)
        self.request_seconds = Histogram(
            name("request_seconds"), "Arrival of a request to its last byte.", buckets=REQUEST_BUCKETS_S, registry=registry
        )
        self.ttft = Histogram(
            name("ttft_seconds"),
            "Arrival of a request to its first token at the gateway.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.ttft_predicted = Histogram(
            name("ttft_predicted_seconds"),
            "What the scheduler predicted, plan to first token.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.ttft_after_plan = Histogram(
            name("ttft_after_plan_seconds"),
            "Plan to first token as it was, of the requests of which the prediction is shown.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.ttft_error = Histogram(
            name("ttft_prediction_error_ratio"),
            "Predicted less actual time from plan to first token, over the actual; absolute.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.tbt = Histogram(
            name("tbt_seconds"),
            "Between two tokens of an answer, as they reach the gateway.",
            buckets=TBT_BUCKETS_S,
            registry=registry,
        )
        self.phases = Histogram(
            name("phase_seconds"), "Prefill queue, load of the cached prefix, prefill compute, hand-over to decode.", ["phase"],
            buckets=PHASE_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(name("prompt_tokens"), "Prompt tokens of answers that began.", registry=registry)
        self.cached_tokens = Counter(
            name("cached_tokens"), "Prompt tokens that came from a cache, by tier.", ["tier"], registry=registry
        )
        self.completion_tokens = Counter(name("completion_tokens"), "Tokens answered.", registry=registry)
        self.retries = Counter(name("attempts_failed"), "Attempts that failed, by cause.", ["cause"], registry=registry)
        self.frames_malformed = Counter(name("frames_malformed"), "Token frames that could not be read.", registry=registry)
        self.events_dropped = Counter(
            name("events_dropped"), "Worker events that belong to no open attempt (late, repeated or strange).", registry=registry
        )
        self.workers_down = Counter(name("workers_down"), "Notices that a worker is gone.", registry=registry)

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """A plan's first token came."""
        self.ttft_predicted.observe(predicted_s)
        self.ttft_after_plan.observe(actual_s)
        self.ttft_error.observe(abs(predicted_s - actual_s) / max(actual_s, 1e-3))

    def answered(self, flight: InFlight) -> None:
        """Account for one sub-request that is over, however it ended."""
        timing = flight.timing
        self.completion_tokens.inc(len(flight.tokens))
        self.events_dropped.inc(flight.dropped)
        if timing.first_token_at is not None:
            self.prompt_tokens.inc(len(flight.job.prompt_ids))
            self.ttft.observe(timing.first_token_at - flight.job.arrived)
        for gap_s in timing.gaps_s:
            self.tbt.observe(gap_s)
        for phase, seconds in _phases(timing):
            self.phases.labels(phase).observe(seconds)
        for tier, tokens in cached_by_tier(flight).items():
            self.cached_tokens.labels(tier).inc(tokens)

    def text(self) -> bytes:
        """The exposition, in Prometheus' text format."""
        return generate_latest(self.registry)


def cached_by_tier(flight: InFlight) -> dict[str, int]:
    """Prompt tokens that came from a cache. (A later attempt's report also covers tokens of the answer; they do not count.)"""
    done = flight.timing.prefill
    if done is None:
        return {}
    left, tiers = len(flight.job.prompt_ids), {}
    found = ("device", done.device_tokens), ("dram", done.dram_tokens), ("ssd", done.ssd_tokens), ("remote", done.remote_tokens)
    for tier, tokens in found:
        tiers[tier] = max(0, min(tokens, left))
        left -= tiers[tier]
    return tiers


def _phases(timing: Timing) -> Iterable[tuple[str, float]]:
    if timing.prefill is not None:
        yield "queue", timing.prefill.queue_s
        yield "load", timing.prefill.load_s
        yield "compute", timing.prefill.compute_s
    if timing.handoff_s is not None:
        yield "handoff", timing.handoff_s
