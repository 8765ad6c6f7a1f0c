"""Workers fail at any point and in any way; the answer is exactly the one that a single healthy worker would have given.

The fake's next token is a checksum of all before it, so one token lost, repeated or taken from an old attempt shows in the text.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway_fakes import FAULTS_ANY, FAULTS_AT, FakeCluster, Fault, reference_text, service_for
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run_virtual

from cluster.gateway.openai.errors import ApiError
from cluster.gateway.ports import PortError
from cluster.gateway.service import Call, GatewayService
from decode_worker.task import DecodeTask
from prefill_worker.task import PrefillTask
from scheduler.plan import Rejection

DEFAULTS = {"stall_timeout_s": 30.0, "gap_timeout_s": 1.0, "retry_backoff_s": 1.0, "call_timeout_s": 5.0}

any_fault = st.one_of(
    st.builds(Fault, st.sampled_from(FAULTS_AT), st.integers(0, 9)),
    st.builds(Fault, st.sampled_from(FAULTS_ANY)),
    st.builds(Fault, st.just("frame_lost"), st.integers(1, 9)),
)


async def answer(service: GatewayService, **fields: object) -> tuple[str, str, dict]:
    """Text, finish reason and usage of a streamed completion; also checks that the stream is well-formed."""
    body = {"model": "tiny", "prompt": "abc", "seed": 0, "stream": True, "stream_options": {"include_usage": True}} | fields
    generation, _ = await service.completion(body, Call("", service.now(), False, lambda n: None))
    events = [event async for event in generation.stream()]
    assert events.pop() == b"data: [DONE]\n\n"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    ends = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert set(ends[:-1]) <= {None}
    return "".join(c["choices"][0]["text"] for c in chunks[:-1]), ends[-1], chunks[-1]["usage"]


async def settled(service: GatewayService, cluster: FakeCluster) -> None:
    """What is left once all calls and workers had their time: nothing."""
    await asyncio.sleep(60)
    assert not cluster.running
    assert not cluster.occupied
    assert not service.dispatcher.in_flight
    service._prompts.close()


def run(cluster: FakeCluster, limits: dict | None = None, **fields: object) -> tuple[str, str, dict]:
    """An answer in virtual time, with the default time-outs; afterwards nothing may be left anywhere."""

    async def whole() -> tuple[str, str, dict]:
        service = service_for(cluster, clock=asyncio.get_running_loop().time, **(DEFAULTS | (limits or {})))
        try:
            return await answer(service, **fields)
        finally:
            await settled(service, cluster)

    return run_virtual(whole())


@settings(max_examples=300, deadline=None)
@given(faults=st.lists(any_fault, max_size=3), length=st.integers(1, 10), eos=st.none() | st.integers(0, 9))
def test_no_token_is_lost_or_repeated(faults: list[Fault], length: int, eos: int | None):
    cluster = FakeCluster(faults=list(faults), eos_after=eos)
    text, reason, usage = run(cluster, max_tokens=length)
    stops = eos is not None and eos < length
    assert text == reference_text("abc", eos if stops else length)
    assert reason == ("stop" if stops else "length")
    assert usage["completion_tokens"] == (eos + 1 if stops else length)
    assert all(length - task.answered > 1 for task in cluster.tasks if isinstance(task, DecodeTask))
    assert all(task.hand_over == (length - task.answered > 1) for task in cluster.tasks if isinstance(task, PrefillTask))


@settings(max_examples=60, deadline=None)
@given(fault=any_fault, start=st.integers(0, 8))
def test_a_stop_string_is_found_across_attempts(fault: Fault, start: int):
    whole = reference_text("abc", 12)
    stop = whole[start : start + 3]
    text, reason, _ = run(FakeCluster(faults=[fault]), max_tokens=12, stop=stop)
    assert (text, reason) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize("kind", [*FAULTS_AT, *FAULTS_ANY])
def test_the_next_attempt_continues_from_what_is_answered(kind: str):
    cluster = FakeCluster(faults=[Fault(kind, 4)])
    run(cluster, max_tokens=9)
    if kind in ("overtaken", "repeats"):
        assert [r.attempt for r in cluster.routed] == [0]
        return
    last = cluster.routed[-1]
    assert (cluster.routed[0].attempt, last.attempt) == (0, 1)
    assert last.tokens == 3 + 9 - last.max_new_tokens
    blamed = {
        "prefill_unreachable",
        "decode_unreachable",
        "prefill_refuses",
        "decode_refuses",
        "handoff",
        "internal",
        "down",
        "silent",
    }
    assert bool(last.avoid) == (kind in blamed), last.avoid
    assert bool(cluster.reported) == (kind in {"prefill_unreachable", "decode_unreachable", "internal", "silent"})


def test_repetitions_are_not_taken_for_gaps():
    cluster = FakeCluster(faults=[Fault("repeats")], step_s=0.9)
    assert run(cluster, max_tokens=9)[0] == reference_text("abc", 9)
    assert len(cluster.routed) == 1


def test_the_only_worker_is_tried_again():
    cluster = FakeCluster(("prefill-0",), ("decode-0",), faults=[Fault("internal", 4)], avoids_strictly=True)
    assert run(cluster, limits={"request_timeout_s": 0.5}, max_tokens=9)[0] == reference_text("abc", 9)


def test_preemption_is_not_failure():
    cluster = FakeCluster(faults=[Fault("preempted", 1)] * 20)
    text, _, _ = run(cluster, max_tokens=30)
    assert text == reference_text("abc", 30)
    assert len(cluster.routed) == 21


def test_attempts_are_limited():
    cluster = FakeCluster(faults=[Fault("internal")] * 10)
    with pytest.raises(ApiError) as failed:
        run(cluster, max_tokens=5)
    assert (failed.value.status, failed.value.code) == (503, "attempts_exhausted")
    assert len([r for r in cluster.routed if not r.avoid]) <= 4
    assert len(cluster.tasks) <= 8


def test_a_deadline_ends_everything():
    cluster = FakeCluster(faults=[Fault("silent", 3)] * 4)
    with pytest.raises(ApiError) as failed:
        run(cluster, max_tokens=9, limits={"request_timeout_s": 50.0})
    assert (failed.value.status, failed.value.code) == (504, "timeout")


def test_the_workers_own_deadline_counts():
    with pytest.raises(ApiError) as failed:
        run(FakeCluster(faults=[Fault("deadline", 3)]), max_tokens=9)
    assert failed.value.status == 504


def test_a_scheduler_that_restarts_is_waited_for():
    cluster = FakeCluster(rejections=[PortError("gone")] * 5)
    assert run(cluster, max_tokens=5)[0] == reference_text("abc", 5)
    assert [r.attempt for r in cluster.routed] == [0, 1, 2, 3, 4, 5]


def test_a_scheduler_that_stays_away_is_503():
    with pytest.raises(ApiError) as failed:
        run(FakeCluster(rejections=[PortError("gone")] * 1000), max_tokens=5)
    assert (failed.value.status, failed.value.code) == (503, "no_scheduler")


def test_an_answer_under_way_waits_for_a_free_worker():
    nobody = Rejection("", 0, "no_worker", 5.0)

    class LosesAll(FakeCluster):
        async def report_failure(self, worker_id: str, request_id: str) -> None:
            self.rejections += [nobody] * 6

    cluster = LosesAll(faults=[Fault("internal", 4)])
    assert run(cluster, max_tokens=9)[0] == reference_text("abc", 9)
    with pytest.raises(ApiError) as failed:
        run(LosesAll(faults=[Fault("internal", 4)]), max_tokens=9, limits={"replan_wait_s": 5.0})
    assert failed.value.code == "no_worker"


def test_tokens_that_do_not_exist_are_the_workers_fault():
    cluster = FakeCluster(answers=lambda tokens, seed: -5 if len(tokens) == 6 else 97)
    with pytest.raises(ApiError) as failed:
        run(cluster, max_tokens=9)
    assert failed.value.code == "attempts_exhausted"
    assert cluster.reported[0] == "decode-0"


def test_an_event_that_our_own_code_cannot_take_ends_the_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway_fakes.ByteDetokenizer.push", lambda self, ids: 1 // 0)
    with pytest.raises(ApiError) as failed:
        run(FakeCluster(), max_tokens=9)
    assert (failed.value.status, failed.value.code) == (500, "internal_error")
