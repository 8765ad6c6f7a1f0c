"""Simulated runs for the benchmark rows: what is run, and the few figures that the rows need of it. Simulated time does not
depend on the machine, so runs go side by side, one a core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.harness import SkipBenchmark
from cluster.simulator.cluster import SimulationSettings, first_guesses, simulate, worker_settings
from cluster.simulator.profile import load_profile
from cluster.simulator.records import Outcome
from cluster.simulator.report.summary import meets, summarise
from cluster.simulator.trace import Trace, read_trace
from kv_pool.settings import PoolSettings
from scheduler.plan import SchedulerSettings

DATA: Final = Path(os.environ.get("MOONPOOL_DATA", Path(__file__).parents[2] / "shared" / "data"))
TRACES: Final = {
    "conversation": "mooncake/conversation_trace.jsonl.xz",
    "toolagent_like": "toolagent_like/toolagent_like.jsonl.xz",
    "agentic": "agentic_merged/dev_g60_w7200.jsonl.xz",
}
PROFILE: Final = "llama3-70b-a800x8"
NO_TARGET: Final = "default=ttft 1000h"
TBT_TARGETS_S: Final = (0.1, 0.2, 0.3)
TTFT_TARGET_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Spec:
    """One run. ``paper``: first come, first served, and copies that were pulled stay, as the papers' systems have it."""

    trace: str
    policy: str
    speed: float
    limit: int | None = None
    prefill: int = 8
    decode: int = 8
    dram_blocks: int = 2000
    paper: bool = True
    admission: str = "none"
    service: str = NO_TARGET
    colocated: bool = False
    whole_prompts: bool = False
    tpot_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Found:
    """``within``: share of all requests with TTFT <= 30 s and a worst tenth of gaps within each of ``TBT_TARGETS_S``. ``load``:
    the decode load over time."""

    mean_ttft_s: float
    p90_ttft_s: float
    hit_rate: float
    completed: int
    rejected: int
    rejected_late: int
    within: tuple[float, float, float]
    goodput: int
    duration_s: float
    load: tuple[float, ...]
    good: int = 0
    """Completed with a first token within 30 s and a mean gap within the ``tpot_s`` of the spec."""
    wasted: float = 0.0
    """Share of all prefill seconds that went into requests which the decode side then refused."""


@cache
def load_trace(name: str, speed: float = 1.0, limit: int | None = None) -> Trace:
    """Raises SkipBenchmark where the recorded traffic is not on this machine."""
    path = DATA / TRACES[name]
    if not path.is_file():
        raise SkipBenchmark(f"the {name} trace is not here (MOONPOOL_DATA names the folder that has it)")
    return read_trace(path, speed=speed, limit=limit)


def settings_of(spec: Spec) -> SimulationSettings:
    profile = load_profile(PROFILE)
    if spec.whole_prompts:
        profile = profile.model_copy(update={"chunk_tokens": 1 << 20})
    scheduler = SchedulerSettings.model_validate(
        {
            "policy": spec.policy, "admission": spec.admission, "classes": (spec.service,), "heartbeat_s": 1.0,
            "suspect_after_s": 3.1, "dead_after_s": 6.0, "request_life_s": 7200.0, "colocated": spec.colocated,
        }
    )  # fmt: skip
    pool = PoolSettings(pulled_copy="stays" if spec.paper else "goes_first")
    order = "fcfs" if spec.paper else "shortest"
    return SimulationSettings(
        profile, spec.prefill, spec.decode, spec.dram_blocks, 0, first_guesses(scheduler, profile), pool, worker_settings(order)
    )  # fmt: skip


def run_one(spec: Spec) -> Found:
    trace = load_trace(spec.trace, spec.speed, spec.limit)
    settings = settings_of(spec)
    result = simulate(trace, settings)
    report = summarise(trace, settings, result, speed=spec.speed, ttft_target_s=TTFT_TARGET_S, tbt_target_s=TBT_TARGETS_S[0])
    count = len(result.records)
    shares = [sum(meets(r, TTFT_TARGET_S, tbt) for r in result.records) for tbt in TBT_TARGETS_S]
    late = sum(r.outcome is Outcome.REJECTED_LATE for r in result.records)
    return Found(
        report.latency.ttft_s.mean or 0.0, report.latency.ttft_s.p90 or 0.0, report.tokens.hit_rate, report.outcomes.completed,
        report.outcomes.rejected, late, (shares[0] / count, shares[1] / count, shares[2] / count), shares[0], result.duration_s,
        tuple(sample.decode_load for sample in result.samples),
        sum(meets(r, TTFT_TARGET_S, 1e9) and (r.tbt_mean_s or 0.0) <= spec.tpot_s for r in result.records),
        sum(r.compute_s or 0.0 for r in result.records if r.outcome is Outcome.REJECTED_LATE)
        / max(1e-9, sum(r.compute_s or 0.0 for r in result.records)),
    )  # fmt: skip


def run_all(specs: Sequence[Spec]) -> dict[Spec, Found]:
    """All of ``specs``, as many at a time as there are cores."""
    for spec in specs:
        load_trace(spec.trace, spec.speed, spec.limit)  # a missing trace is a skip here, not a crash in a child
    # Fresh processes: a forked one would have this one's handler of SIGTERM, and go on when it is told to end.
    with ProcessPoolExecutor(max_workers=os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        return dict(zip(specs, pool.map(run_one, specs), strict=True))


def capacity(found: Sequence[tuple[float, float]], share: float = 0.9) -> float:
    """The speed up to which ``share`` of the requests met their targets, between the points (speed, share met) on a straight
    line; 0 where not even the slowest did, the fastest where all did (a lower bound). Points are in the order of speed."""
    before = (0.0, 0.0)
    for speed, met in found:
        if met < share:
            return before[0] + (speed - before[0]) * (before[1] - share) / (before[1] - met) if before[1] >= share else 0.0
        before = (speed, met)
    return before[0]
