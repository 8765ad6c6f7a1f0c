"""``report.json``: what one run of traffic against a cluster came to, simulated or live. Seconds, tokens, bytes; rates are shares
of 1.

Every number is rounded to seven significant digits, and nothing in it depends on when or where it was made: equal runs give equal
bytes.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Run(_Model):
    """What was run."""

    trace: str
    requests: int
    speed: float
    profile: str
    prefill_workers: int
    decode_workers: int
    colocated: bool
    dram_blocks_per_node: int
    ssd_blocks_per_node: int
    block_tokens: int
    policy: str
    admission: str
    order: str
    eviction: str
    seed: int
    duration_s: float
    """From the first arrival to the last end."""


class Spread(_Model):
    """A distribution over ``count`` values; all else None where there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Latency(_Model):
    """Of completed requests. ``tbt_s``: gaps between tokens, all of them alike. ``tbt_worst_tenth_s``: each request's mean of its
    longest tenth of gaps, what a target is held against."""

    ttft_s: Spread
    tbt_s: Spread
    tbt_worst_tenth_s: Spread
    e2e_s: Spread
    queue_s: Spread
    load_s: Spread
    compute_s: Spread
    handoff_s: Spread


class Goodput(_Model):
    """Requests that completed with a first token within ``ttft_target_s`` and a worst tenth of gaps within ``tbt_target_s``, over
    all that arrived; and per second of the run."""

    ttft_target_s: float
    tbt_target_s: float
    share: float
    ttft_share: float
    tbt_share: float
    requests_per_s: float


class Outcomes(_Model):
    """``rejected_late``: by the decode worker, after its prefill. ``reasons``: of all that were not completed."""

    completed: int
    rejected: int
    rejected_late: int
    failed: int
    reasons: dict[str, int]


class Tokens(_Model):
    """Of completed requests. ``hit_rate`` is cached input tokens over input tokens, in all and by the tier they came from."""

    input: int
    output: int
    cached: int
    hit_rate: float
    hit_rate_by_tier: dict[str, float]
    input_per_s: float
    output_per_s: float


class Work(_Model):
    """By worker: share of the run in which it computed. Bytes moved by way."""

    busy_share: dict[str, float]
    moved_bytes: dict[str, int]
    wasted_prefill_s: float
    """Computed for requests that were then turned away."""


class Prediction(_Model):
    """Predicted against actual time to first token: absolute relative error."""

    count: int
    error_p50: float | None
    error_p90: float | None


class Moment(_Model):
    """The cluster at one time; lists by worker or node in the order of ``workers`` and ``nodes``."""

    time_s: float
    queue_tokens: list[int]
    batch: list[int]
    dram_blocks: list[int]
    ssd_blocks: list[int]
    prefill_load: float
    decode_load: float
    replicas_mean: float
    """Nodes that hold one of the (at most 100) most used blocks."""
    replicas_max: int


class Report(_Model):
    schema_version: int
    run: Run
    outcomes: Outcomes
    latency: Latency
    goodput: Goodput
    tokens: Tokens
    work: Work
    prediction: Prediction
    prefill_workers: list[str]
    decode_workers: list[str]
    nodes: list[str]
    over_time: list[Moment]
    counters: dict[str, int]


class CacheOnlyRow(_Model):
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int
    block_references: int
    block_hits: int
    block_hit_rate: float
    token_hit_rate: float
    evictions: int


class CacheOnlyReport(_Model):
    """``report.json`` of ``--cache-only``: hit rates without time."""

    schema_version: int
    trace: str
    requests: int
    block_tokens: int
    rows: list[CacheOnlyRow]
