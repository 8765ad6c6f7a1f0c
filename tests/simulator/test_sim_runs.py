"""Whole simulated runs on a small cut of a trace: equal bytes, golden counts, and the outside checkers after all kinds of
faults."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from cluster.simulator.cluster import Simulation, SimulationSettings, first_guesses, simulate
from cluster.simulator.faults import AT_NODES, KINDS, Fault, random_faults
from cluster.simulator.profile import load_profile
from cluster.simulator.records import Outcome, RunResult
from cluster.simulator.trace import Trace, read_trace
from kv_pool.settings import PoolSettings
from scheduler.plan import SchedulerSettings

CUT = Path(__file__).parent.parent / "data" / "conversation_cut.jsonl"
PROFILE = load_profile("llama3-70b-a800x8")
POLICIES = get_args(SchedulerSettings.model_fields["policy"].annotation)


def cut(count: int, speed: float = 1.0) -> Trace:
    return read_trace(CUT, limit=count, speed=speed)


def settings(
    policy: str = "ours", *, prefill: int = 3, decode: int = 3, dram: int = 600, ssd: int = 0, faults: tuple[Fault, ...] = (),
    seed: int = 0, **scheduler: object,
) -> SimulationSettings:  # fmt: skip
    given = SchedulerSettings.model_validate(
        {"policy": policy, "classes": ("default=ttft 10h",), "admission": "none"} | scheduler
    )
    return SimulationSettings(
        PROFILE, prefill, decode, dram, ssd, first_guesses(given, PROFILE), faults=faults, seed=seed
    )  # fmt: skip


def mean_ttft(result: RunResult) -> float:
    done = [record.ttft_s for record in result.records if record.ttft_s is not None]
    return sum(done) / len(done)


GOLDEN = {
    "random": (300, 252928, 6295),
    "round_robin": (300, 184320, 6578),
    "least_loaded": (300, 233472, 6512),
    "local_cache_aware": (300, 221184, 6515),
    "mooncake": (300, 335360, 6415),
    "ours": (300, 295424, 6414),
}
"""Of 300 requests: completed, cached tokens, evictions. Whoever changes a policy changes these on purpose."""


@pytest.mark.parametrize("policy", POLICIES)
def test_golden_counts(policy: str):
    simulation = Simulation(cut(300, speed=2.0), settings(policy, dram=1500))
    result = simulation.run()
    simulation.check()
    done = [record for record in result.records if record.outcome is Outcome.COMPLETED]
    assert (len(done), sum(record.cached_tokens for record in done), result.counters["evictions"]) == GOLDEN[policy]


def test_equal_seeds_give_equal_runs_and_others_do_not():
    runs = [
        simulate(cut(60), settings("random", seed=1, faults=random_faults(5, ("prefill-000",), ("p000",), 30.0, 3))) for _ in "ab"
    ]
    assert [asdict(record) for record in runs[0].records] == [asdict(record) for record in runs[1].records]
    assert runs[0].samples == runs[1].samples
    plain = settings("random")
    seeds = [simulate(cut(60), replace(plain, scheduler=plain.scheduler.model_copy(update={"seed": seed}))) for seed in (0, 0, 7)]
    one, same, other = ([asdict(record) for record in run.records] for run in seeds)
    assert one == same != other


def test_one_request_alone_takes_what_the_profile_says():
    """No queue, no cache: prefill in pieces, then one step a token; the terms are the profile's own formula."""
    trace = cut(1)
    (record,) = simulate(trace, settings(prefill=1, decode=1)).records
    tokens, chunk = record.input_tokens, PROFILE.chunk_tokens
    borders = [*range(0, tokens, chunk), tokens]
    compute_s = sum(PROFILE.prefill_s(end - start, start) for start, end in pairwise(borders))
    assert record.compute_s == pytest.approx(compute_s)
    assert record.ttft_s == pytest.approx(compute_s, abs=3 * PROFILE.latency_s + 1e-9)
    steps = [PROFILE.step_s(1, tokens + 1 + i) for i in range(record.output_tokens - 1)]
    assert record.finished_s is not None
    assert record.handoff_s is not None
    assert record.finished_s == pytest.approx(record.ttft_s + record.handoff_s + sum(steps))  # type: ignore[operator]
    assert record.tbt_mean_s == pytest.approx((record.handoff_s + sum(steps)) / len(steps))
    assert record.tbt_max_s == pytest.approx(record.handoff_s + steps[0])


def test_a_second_request_of_the_same_prompt_hits():
    trace = cut(1)
    again = replace(trace.requests[0], index=1, arrived_s=60.0)
    result = simulate(Trace("twice", trace.block_tokens, (trace.requests[0], again)), settings())
    full = trace.requests[0].input_tokens // trace.block_tokens * trace.block_tokens
    assert [record.cached_tokens for record in result.records] == [0, full]
    assert result.records[1].ttft_s < result.records[0].ttft_s / 2  # type: ignore[operator]


def test_what_left_dram_comes_back_from_the_ssd():
    with_ssd = simulate(cut(300, speed=2.0), settings(dram=250, ssd=4000))
    without = simulate(cut(300, speed=2.0), settings(dram=250))
    assert with_ssd.moved_bytes["ssd_read"] > 0
    assert with_ssd.moved_bytes["ssd_write"] > 0
    assert without.moved_bytes["ssd_read"] == without.moved_bytes["ssd_write"] == 0
    assert sum(record.cached_tokens for record in with_ssd.records) > sum(record.cached_tokens for record in without.records)


def test_a_copy_that_was_pulled_makes_room_for_others():
    """Nodes that are as full hold more different blocks."""
    different = {}
    for what in ("goes_first", "stays"):
        given = replace(settings(dram=600), pool=PoolSettings.model_validate({"pulled_copy": what}))
        simulation = Simulation(cut(300, speed=2.0), given)
        simulation.run()
        held = [key for node in simulation.world.nodes.values() for key in node.keys_by_medium()["dram"]]
        assert len(held) == 6 * 600
        different[what] = len(set(held))
    assert different["goes_first"] > different["stays"]


def test_coupled_serving_makes_tokens_wait_for_prompts():
    coupled = simulate(cut(120), settings("least_loaded", prefill=4, colocated=True))
    apart = simulate(cut(120), settings("least_loaded", prefill=2, decode=2))
    assert all(record.prefill_worker[-3:] == record.decode_worker[-3:] for record in coupled.records)
    worst = [max(record.tbt_max_s or 0.0 for record in run.records) for run in (coupled, apart)]
    assert worst[0] > 2 * worst[1]


def test_a_link_that_is_slow_makes_pulls_slow():
    slow = replace(settings("mooncake"), profile=PROFILE.model_copy(update={"nic_bytes_per_s": 1e8}))
    fast = settings("mooncake")
    assert mean_ttft(simulate(cut(100), slow)) > mean_ttft(simulate(cut(100), fast))


def test_gates_turn_away_before_any_work_what_would_be_refused_after_the_prefill():
    """Twenty times as fast as recorded, on one pair: far too much."""
    target = {"classes": ("default=ttft 20s tpot 33ms",)}
    runs = {
        mode: simulate(cut(150, speed=20.0), settings(prefill=1, decode=1, **(target | {"admission": mode})))
        for mode in ("none", "early", "predictive")
    }
    counts = {mode: [sum(r.outcome is outcome for r in run.records) for outcome in Outcome] for mode, run in runs.items()}
    assert all(sum(each) == 150 for each in counts.values())
    assert counts["predictive"][2] < counts["early"][2] <= counts["none"][2]
    assert all(each[1] > 0 for each in counts.values())
    turned_away = [r for r in runs["predictive"].records if r.outcome is Outcome.REJECTED]
    assert all(r.compute_s is None and r.finished_s == pytest.approx(r.arrived_s) for r in turned_away)


def test_higher_classes_go_first():
    trace = cut(150, speed=4.0)
    mixed = tuple(replace(request, request_class="gold" if i % 4 == 0 else "") for i, request in enumerate(trace.requests))
    given = {"classes": ("default=ttft 10h", "gold=ttft 10h priority 5")}
    result = simulate(Trace("mixed", trace.block_tokens, mixed), settings(prefill=1, decode=6, **given))
    by_class = {
        name: [r.ttft_s for r in result.records if r.request_class == name and r.ttft_s is not None] for name in ("gold", "")
    }
    assert sum(by_class["gold"]) / len(by_class["gold"]) < 0.6 * sum(by_class[""]) / len(by_class[""])
    assert all(record.outcome is Outcome.COMPLETED for record in result.records), "and nobody starves"


# --- faults --------------------------------------------------------------------------------------------------------------


def test_the_pause_of_an_answer_that_was_planned_again_is_one_of_its_gaps():
    """A decode worker dies: what its answers waited for is in their gaps, so none of them counts as smooth."""
    result = simulate(cut(60), settings(faults=(Fault("kill", "decode-000", 30.0, 10.0),)))
    broken = [r for r in result.records if r.attempts > 1 and r.ttft_s is not None and r.arrived_s + r.ttft_s < 30.0]
    assert broken
    for record in broken:
        assert record.outcome is Outcome.COMPLETED
        assert record.tbt_max_s > 1.0  # type: ignore[operator] # longer than it takes to notice


WORKERS = tuple(f"{role}-{i:03}" for role in ("prefill", "decode") for i in range(3))
NODES = tuple(f"{role}{i:03}" for role in "pd" for i in range(3))


def run_with(faults: tuple[Fault, ...], seed: int, count: int = 40, policy: str = "ours") -> RunResult:
    """Run, and let the outside checkers look at what is left."""
    simulation = Simulation(cut(count, speed=3.0), settings(policy, dram=200, ssd=400 * (seed % 2), faults=faults, seed=seed))
    result = simulation.run()
    simulation.check()
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_alone(kind: str):
    targets = ("p000", "d001") if kind in AT_NODES else ("prefill-000", "decode-001")
    faults = tuple(Fault(kind, target, 3.0, 8.0, 0.5 if kind == "lose_events" else 10.0) for target in targets)  # type: ignore[arg-type]
    result = run_with(faults, 1)
    assert all(record.outcome is Outcome.COMPLETED for record in result.records)


def test_a_killed_worker_s_requests_are_answered_by_another():
    result = run_with((Fault("kill", "prefill-001", 4.0, 30.0), Fault("kill", "decode-000", 5.0, 30.0)), 0)
    assert result.counters["retries"] > 0
    assert all(record.outcome is Outcome.COMPLETED for record in result.records)


def test_who_is_frozen_for_long_is_given_up_and_its_late_work_changes_nothing():
    frozen = (Fault("freeze", "prefill-001", 4.0, 30.0), Fault("freeze", "decode-000", 5.0, 30.0))
    result = run_with(frozen, 0)
    assert result.counters["retries"] > 0
    assert all(record.outcome is Outcome.COMPLETED for record in result.records)
    assert mean_ttft(result) > mean_ttft(run_with((), 0))


def test_a_node_without_its_disk_goes_on_and_fills_an_empty_one_later():
    faults = tuple(Fault("dead_disk", node, 45.0, 20.0) for node in NODES)
    simulation = Simulation(cut(200), settings(dram=200, ssd=2000, faults=faults))
    result = simulation.run()
    simulation.check()
    assert all(record.outcome is Outcome.COMPLETED for record in result.records)
    held = [sum(sample.ssd_blocks) for sample in result.samples]
    assert held[4] > 0, "after 40 s"
    assert held[5] == held[6] == 0
    assert held[-1] > 0


def test_what_a_node_was_sending_when_it_died_does_not_arrive():
    given = replace(settings(prefill=2, decode=1), profile=PROFILE.model_copy(update={"nic_bytes_per_s": 2e8}))
    (whole,) = simulate(cut(1), given).records
    assert whole.ttft_s is not None
    assert whole.handoff_s is not None
    assert whole.handoff_s > 2.0, "its blocks are long on their way"
    node = "p" + whole.prefill_worker[-3:]
    simulation = Simulation(cut(1), replace(given, faults=(Fault("kill_node", node, whole.ttft_s + 1.0, 0.5),)))
    (record,) = simulation.run().records
    simulation.check()
    assert (record.outcome, record.attempts) == (Outcome.COMPLETED, 2)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_faults_leave_nothing_behind(first: int):
    for seed in range(first, first + 10):
        run_with(random_faults(seed, WORKERS, NODES, 20.0, 5), seed, count=25, policy=POLICIES[seed % len(POLICIES)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_many_random_faults_leave_nothing_behind(first: int):
    for seed in range(first, first + 20):
        run_with(random_faults(1000 + seed, WORKERS, NODES, 40.0, 12), seed, count=60, policy=POLICIES[seed % len(POLICIES)])
