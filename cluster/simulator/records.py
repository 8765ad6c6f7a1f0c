"""What a simulated run leaves behind: one record per request, one sample per moment, and sums. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from scheduler.plan import PlanTerms


class Outcome(StrEnum):
    """``REJECTED``: before any work was done. ``REJECTED_LATE``: by the decode worker, its prefill computed for nothing."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    REJECTED_LATE = "rejected_late"
    FAILED = "failed"


@dataclass(slots=True)
class RequestRecord:
    """One request of the trace. Times are seconds of simulated time since the run's start, durations seconds; ``None`` where it
    did not get that far. Tokens by tier are those reused at prefill."""

    index: int
    request_id: str
    request_class: str
    session: str | None
    arrived_s: float
    input_tokens: int
    output_tokens: int
    outcome: Outcome = Outcome.FAILED
    reason: str = ""
    attempts: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    predicted: PlanTerms | None = None
    queue_s: float | None = None
    load_s: float | None = None
    compute_s: float | None = None
    handoff_s: float | None = None
    ttft_s: float | None = None
    finished_s: float | None = None
    tbt_mean_s: float | None = None
    tbt_p99_s: float | None = None
    tbt_max_s: float | None = None
    tbt_worst_tenth_s: float | None = None
    """Mean of the longest tenth of its token gaps: what a TBT target is held against."""
    device_tokens: int = 0
    dram_tokens: int = 0
    ssd_tokens: int = 0
    remote_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.dram_tokens + self.ssd_tokens + self.remote_tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment. Tuples are in the order of ``RunResult.prefill_workers``, ``decode_workers`` and ``nodes``."""

    time_s: float
    queue_tokens: tuple[int, ...]
    batch: tuple[int, ...]
    dram_blocks: tuple[int, ...]
    ssd_blocks: tuple[int, ...]
    prefill_load: float
    """Mean predicted queue over the TTFT target, 1.0 = at the target."""
    decode_load: float
    """Mean step time over the time-per-token target."""
    replicas: tuple[int, ...]
    """Nodes that hold each of the most used blocks so far (at most 100), most used first."""


@dataclass(slots=True)
class RunResult:
    """``gaps_s`` and ``gap_counts``: all token gaps of completed requests, as a histogram over its sorted distinct (rounded)
    values. ``moved_bytes`` by way: ``local``, ``network``, ``ssd_read``, ``ssd_write``."""

    records: list[RequestRecord]
    samples: list[Sample]
    prefill_workers: tuple[str, ...]
    decode_workers: tuple[str, ...]
    nodes: tuple[str, ...]
    duration_s: float
    """Simulated seconds from the first arrival to the last end."""
    block_tokens: int
    gaps_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    gap_counts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    moved_bytes: dict[str, int] = field(default_factory=dict[str, int])
    busy_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds that each worker computed."""
    counters: dict[str, int] = field(default_factory=dict[str, int])
    """The scheduler's counters, and the world's (retries, evictions)."""
    prediction: dict[str, Any] = field(default_factory=dict[str, Any])
    """The scheduler's own view of its predictions (:class:`~scheduler.truth.PredictionLog`)."""
