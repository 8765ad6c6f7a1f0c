"""``report.json`` and ``requests.jsonl``: what one run of traffic against a cluster came to, simulated or live. Seconds, tokens,
bytes; rates are shares of 1. As a JSON schema: ``docs/report.schema.json`` (``reference.py`` makes it).

Every number is rounded to seven significant digits, and nothing in it depends on when or where it was made: equal runs give equal
bytes.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION: Final = 1
MOMENTS_MAX: Final = 2000
"""``over_time`` has no more than these; of a longer run, every n-th sample."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Run(_Model):
    """The traffic."""

    trace: str
    requests: int
    """That arrived."""
    speed: float
    """So many times as fast as recorded."""
    seed: int
    duration_s: float
    """From the first arrival to the last end."""


class Cluster(_Model):
    """What the traffic met, as far as whoever measured was told."""

    profile: str
    """Hardware and model."""
    prefill_workers: int
    decode_workers: int
    colocated: bool
    """Each node prefills and decodes on the same accelerators."""
    dram_blocks_per_node: int
    ssd_blocks_per_node: int
    block_tokens: int
    policy: str
    balancing_threshold: float
    admission: str
    order: str
    """Of the prompts at one worker."""
    eviction: str
    pulled_copy: str


class Spread(_Model):
    """A distribution over ``count`` values; all else None where there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Latency(_Model):
    """Of completed requests."""

    ttft_s: Spread
    """Arrival to first token."""
    tbt_s: Spread
    """Gaps between tokens, all gaps of all requests alike."""
    tbt_worst_tenth_s: Spread
    """Each request's mean of its longest tenth of gaps: what a target is held against."""
    e2e_s: Spread
    """Arrival to last token."""
    queue_s: Spread
    """What of the time to first token is neither load nor compute: waiting, and attempts that failed."""
    load_s: Spread
    """Getting cached blocks to the prefill worker."""
    compute_s: Spread
    """Forwards of the prompt."""
    handoff_s: Spread
    """From the end of the prefill until the decode worker has the prompt's blocks."""


class Goodput(_Model):
    """Requests that completed with a first token within ``ttft_target_s`` and a worst tenth of gaps within ``tbt_target_s``, over
    all that arrived; and per second of the run."""

    ttft_target_s: float
    tbt_target_s: float
    share: float
    ttft_share: float
    """Completed within the first target, whatever the second; over all that arrived."""
    tbt_share: float
    """Completed within the second target, whatever the first; over all that arrived."""
    requests_per_s: float


class Outcomes(_Model):
    """Each request is counted once."""

    completed: int
    rejected: int
    """Before any work was done."""
    rejected_late: int
    """By the decode worker, its prefill computed for nothing."""
    failed: int
    reasons: dict[str, int]
    """Errors by kind, of all that were not completed: their texts with ``#`` in place of numbers."""


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
    """The cluster at one time; lists in the order of ``prefill_workers``, ``decode_workers`` or ``nodes``."""

    time_s: float
    queue_tokens: list[int]
    """Still to compute, by prefill worker."""
    batch: list[int]
    """Sequences, by decode worker."""
    dram_blocks: list[int]
    ssd_blocks: list[int]
    prefill_load: float
    """Mean predicted queue over the target of the time to first token."""
    decode_load: float
    """Mean step time over the target of the time between tokens."""
    replicas_mean: float
    """Nodes that hold one of the (at most 100) most used blocks."""
    replicas_max: int


class Report(_Model):
    """``report.json``."""

    schema_version: int
    run: Run
    cluster: Cluster
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


class Predicted(_Model):
    """What the scheduler said when it planned; ``overlap_s`` of the load happens while the request would wait anyway."""

    ttft_s: float
    queue_s: float
    load_s: float
    compute_s: float
    handoff_s: float
    overlap_s: float


class RequestRow(_Model):
    """One line of ``requests.jsonl``. Null where the request did not get that far."""

    index: int
    """Its place in the trace, from 0."""
    request_id: str
    request_class: str
    session: str | None
    arrived_s: float
    """Since the run's start."""
    input_tokens: int
    output_tokens: int
    """Asked for."""
    outcome: Literal["completed", "rejected", "rejected_late", "failed"]
    reason: str
    good: bool
    """Completed within both targets."""
    attempts: int
    prefill_worker: str
    decode_worker: str
    predicted: Predicted | None
    ttft_s: float | None
    e2e_s: float | None
    """Arrival to the end, whichever it was."""
    queue_s: float | None
    """What of the time to first token is neither load nor compute."""
    load_s: float | None
    compute_s: float | None
    handoff_s: float | None
    tbt_mean_s: float | None
    tbt_p99_s: float | None
    tbt_max_s: float | None
    tbt_worst_tenth_s: float | None
    """Mean of its longest tenth of gaps: what a target is held against."""
    cached_tokens: int
    """Of the input; the sum of the following."""
    device_tokens: int
    dram_tokens: int
    ssd_tokens: int
    remote_tokens: int


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
