"""What the gateway tells of a prediction: to the scheduler, in its metrics, and in its log. In virtual time, so all is exact."""

from __future__ import annotations

import asyncio
import logging

import pytest
from gateway_fakes import FakeCluster, Fault, service_for
from test_gateway_failover import answer, settled
from virtual_time import run_virtual

from scheduler.plan import Plan, PlanTerms, Rejection, RouteRequest

TERMS = PlanTerms(0.1, 0.3, 0.5, 9.0, overlap_s=0.1)
PREFILL_S = 1.6
"""What it takes; 0.8 is what was predicted."""


class Predicting(FakeCluster):
    async def route(self, request: RouteRequest) -> Plan | Rejection:
        plan = await super().route(request)
        assert isinstance(plan, Plan)
        return Plan(
            plan.request_id, plan.attempt, plan.prefill_worker, plan.decode_worker, plan.cached_blocks, None, None, TERMS
        )  # fmt: skip


def run(cluster: FakeCluster, **fields: object) -> str:
    """The exposition after one answer."""

    async def whole() -> str:
        service = service_for(
            cluster, clock=asyncio.get_running_loop().time, stall_timeout_s=30.0, gap_timeout_s=1.0, retry_backoff_s=1.0,
            call_timeout_s=5.0,
        )  # fmt: skip
        await answer(service, **fields)
        await settled(service, cluster)
        return service.metrics.text().decode()

    return run_virtual(whole())


def value(exposition: str, name: str) -> float:
    (line,) = [line for line in exposition.splitlines() if line.startswith(f"moonpool_gateway_{name} ")]
    return float(line.split()[-1])


def test_predicted_and_actual_and_their_ratio_are_metrics_and_one_line_has_the_terms(caplog: pytest.LogCaptureFixture):
    cluster = Predicting(prefill_s=PREFILL_S)
    with caplog.at_level(logging.INFO, "cluster.gateway.dispatch"):
        shown = run(cluster, max_tokens=6)
    ((_, ttft_s, tokens),) = cluster.truths
    assert ttft_s == pytest.approx(PREFILL_S)
    assert tokens == 6
    assert value(shown, "ttft_predicted_seconds_sum") == pytest.approx(0.8)
    assert value(shown, "ttft_after_plan_seconds_sum") == pytest.approx(PREFILL_S)
    assert value(shown, "ttft_prediction_error_ratio_sum") == pytest.approx(0.5)
    (line,) = [record.getMessage() for record in caplog.records if "first token" in record.getMessage()]
    assert "first token after 1.6000 s, predicted 0.8000" in line
    assert "queue 0.0010/0.1000 load 0.0020/0.3000 (0.1000 in the queue) compute 0.0030/0.5000" in line


def test_an_attempt_without_a_first_token_has_no_truth_and_the_next_has_its_own():
    cluster = Predicting(prefill_s=PREFILL_S, faults=[Fault("prefill_refuses")])
    shown = run(cluster, max_tokens=6)
    assert [(ttft_s is None, tokens) for _, ttft_s, tokens in cluster.truths] == [(True, None), (False, 6)]
    assert cluster.truths[1][1] == pytest.approx(PREFILL_S)  # from its own plan on, not from the first
    assert value(shown, "ttft_predicted_seconds_count") == 1.0
