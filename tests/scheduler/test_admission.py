"""Service classes, the forecast of a decode batch, expected lengths, and the three gates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_scene import keys_of, small_cluster

from decode_worker.task import DecodeLoad
from scheduler.admission.classes import ServiceClass, parse_classes
from scheduler.admission.forecast import Stay, batch_at, next_end
from scheduler.admission.gate import GATES, Forecast
from scheduler.admission.lengths import CLASSES_MAX, PRIOR, AnswerLengths
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings


def test_classes_are_read_from_rows_and_the_first_is_the_default():
    classes = parse_classes(["interactive = ttft 2s tpot 100ms priority 10", "batch=ttft 10m", "free="])
    assert list(classes) == ["interactive", "batch", "free"]
    assert classes["interactive"] == ServiceClass("interactive", 2.0, 0.1, 10)
    assert classes["batch"] == ServiceClass("batch", 600.0, math.inf, 0)
    assert classes["free"] == ServiceClass("free", math.inf, math.inf, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("interactive", "is not of the form"),
        ("=ttft 2s", "is not of the form"),
        ("Big Name=ttft 2s", "is not of the form"),
        ("a=ttft", "'ttft' has no value"),
        ("a=ttft 2", "ttft '2' is not a time"),
        ("a=ttft 0s", "ttft '0s' is not a time"),
        ("a=tpot -5ms", "tpot '-5ms' is not a time"),
        ("a=ttft 2s ttft 3s", "ttft is there twice"),
        ("a=priority 1.5", "priority '1.5' is not a whole number"),
        ("a=priority 101", "priority '101' is not a whole number"),
        ("a=speed 3", "'speed' is not one of ttft, tpot, priority"),
    ],
)
def test_a_row_that_is_wrong_is_named(row: str, message: str):
    with pytest.raises(ValueError, match=rf"scheduler\.classes: .*{message}"):
        parse_classes([row])


def test_no_class_and_one_class_twice_are_refused():
    with pytest.raises(ValueError, match=r"scheduler\.classes: 1 to"):
        parse_classes([])
    with pytest.raises(ValueError, match="'a' is there twice"):
        parse_classes(["a=", "a=ttft 2s"])


def test_lengths_start_from_the_guess_and_follow_the_class_s_own_history():
    lengths = AnswerLengths(256)
    assert lengths.expected("chat", 1000) == 256
    assert lengths.expected("chat", 10) == 10
    for _ in range(2000):
        lengths.observe("chat", 40)
    assert lengths.expected("chat", 1000) == pytest.approx(40, rel=0.05)
    assert lengths.expected("agent", 1000) == 256
    lengths.observe("agent", 256 + PRIOR + 1)
    assert lengths.expected("agent", 1000) == pytest.approx(257)


def test_strange_classes_do_not_take_memory_for_ever():
    lengths = AnswerLengths(10)
    for i in range(CLASSES_MAX + 50):
        lengths.observe(f"c{i}", 500)
    assert lengths.expected(f"c{CLASSES_MAX + 10}", 1000) == 10
    lengths.observe("c0", -5)
    assert lengths.expected("c0", 1000) > 10


stays = st.lists(
    st.builds(lambda a, n, c: Stay(a, a + n, c), st.floats(0, 50), st.floats(0, 20), st.integers(0, 1000)), max_size=12
)


@given(stays, st.floats(0, 80))
def test_the_forecast_is_what_counting_says(found: list[Stay], t: float):
    """Those that are there now count whole; later, the longer it is until then, the less; whoever comes in between counts from
    then."""
    found = [replace(stay, under_way=stay.starts_at <= t) for stay in found]
    there = [stay for stay in found if stay.under_way]
    assert batch_at(found, t, t) == (len(there), sum(stay.context_tokens for stay in there))
    assert next_end(found, t) == max(t, min((stay.ends_at for stay in there), default=t))
    later = batch_at(there, t + 5.0, t)[0]
    assert later <= len(there)
    assert later == pytest.approx(sum(math.exp(-5.0 / max(stay.ends_at - stay.starts_at, 1e-9)) for stay in there))
    newcomer = Stay(t + 5.0, t + 9.0, 7)
    assert batch_at([newcomer], t + 5.0, t) == (1.0, 7.0)
    assert batch_at([newcomer], t + 4.9, t) == (0.0, 0.0)


def test_a_late_moment_is_not_an_empty_one_where_requests_keep_coming():
    """Two a second that stay ten seconds each: twenty in the long run, whatever is known of them now."""
    known = [Stay(-1.0, 9.0, 500, under_way=True) for _ in range(20)]
    for later in (0.0, 5.0, 20.0, 200.0):
        sequences, context = batch_at(known, later, 0.0, rate=2.0)
        assert sequences == pytest.approx(20.0)
        assert context == pytest.approx(20.0 * 500)
    assert batch_at(known, 200.0, 0.0)[0] < 1e-6
    coming = [*known, *(Stay(0.5 * i, 0.5 * i + 10.0, 500) for i in range(1, 11))]
    assert batch_at(coming, 5.0, 0.0, rate=2.0)[0] == pytest.approx(20.0, rel=0.05), "what is known of them is not added twice"


TARGET = ServiceClass("a", 2.0, 0.1)
GATE_TABLE = {
    "all well": (Forecast(1.0, 0.05, 0.05, 3.0), {"none": None, "early": None, "predictive": None}),
    "the first token too late": (Forecast(3.0, 0.05, 0.05, 3.0), {"none": 1.0, "early": 1.0, "predictive": 1.0}),
    "busy now, not then": (Forecast(1.0, 0.2, 0.05, 3.0), {"none": None, "early": 3.0, "predictive": None}),
    "free now, busy then": (Forecast(1.0, 0.05, 0.2, 3.0), {"none": None, "early": None, "predictive": 3.0}),
    "exactly on both targets": (Forecast(2.0, 0.1, 0.1, 3.0), {"none": None, "early": None, "predictive": None}),
}


@pytest.mark.parametrize("name", GATE_TABLE)
@pytest.mark.parametrize("mode", GATES)
def test_gates(name: str, mode: str):
    forecast, expected = GATE_TABLE[name]
    verdict = GATES[mode].judge(TARGET, forecast)
    assert (None if verdict.admit else verdict.retry_after_s) == expected[mode]
    assert bool(verdict.reason) == (not verdict.admit)


# --- in the scheduler ----------------------------------------------------------------------------------------------------


def busy_decode(mode: str):  # type: ignore[no-untyped-def]
    """One pair; the decode worker decodes ten sequences at 200 ms a step, which the scheduler has learned."""
    scene = small_cluster(SchedulerSettings(admission=mode, classes=("default=ttft 100s tpot 150ms",)), prefill=1, decode=1)  # type: ignore[arg-type]
    steps = tuple((n, n * 500, 0.01 + 0.019 * n) for n in range(1, 11))
    for _ in range(5):
        scene.workers["d0"].load = DecodeLoad(0, 10, 800, 1000, 0.2, context_tokens=5000, steps=steps)
        scene.beat()
    return scene


def test_early_looks_at_the_batch_that_is_there_now():
    rejection = busy_decode("early").reject("r", keys_of("doc", 4))
    assert (rejection.reason, rejection.detail) == ("overloaded", "the tokens would come too slowly")
    assert rejection.retry_after_s >= 1.0
    assert isinstance(busy_decode("none").route("r", keys_of("doc", 4)), Plan)


def test_predictive_looks_at_the_batch_at_the_end_of_its_prefill():
    """Of requests that the scheduler has planned itself it knows when they end: a long prompt comes when they are gone."""
    scene = small_cluster(
        SchedulerSettings(classes=("default=ttft 1000s tpot 100ms",), prefill_tokens_per_s=4000.0), prefill=2, decode=1
    )
    steps = tuple((n, 4000, 0.02 * n) for n in range(1, 11))
    scene.workers["d0"].load = DecodeLoad(0, 0, 10_000, 10_000, 0.0, steps=steps * 4)
    scene.beat()
    planned = 0
    while isinstance(scene.route(f"r{planned}", keys_of(f"doc{planned}", 4), max_new_tokens=50), Plan):
        planned += 1
    assert 3 <= planned <= 6
    long = keys_of("long", 800)
    assert isinstance(scene.route("later", long, max_new_tokens=50), Plan)
    assert isinstance(scene.route("now", keys_of("short", 4), max_new_tokens=50), Rejection)


def test_a_request_s_own_targets_take_the_place_of_its_class_s():
    scene = small_cluster(SchedulerSettings(classes=("default=ttft 100s", "fast=ttft 1s priority 3")), prefill=1)
    keys = keys_of("doc", 16)  # 2.6 s of prefill

    def route(name: str, **how: object) -> Plan | Rejection:
        return scene.state.route(RouteRequest(name, 0, keys, 16 * 64 + 10, 10, **how), scene.now)  # type: ignore[arg-type]

    assert isinstance(route("a", request_class="fast"), Rejection)
    assert isinstance(route("b", slo_ttft_s=1.0), Rejection)
    assert isinstance(route("c", request_class="nobody's", slo_ttft_s=1.0), Rejection)
    plan = route("d", request_class="fast", slo_ttft_s=30.0)
    assert isinstance(plan, Plan)
    assert plan.priority == 3
    assert len(scene.state.assignments) == 1


def test_what_was_admitted_once_is_not_turned_away_later():
    scene = small_cluster(SchedulerSettings(classes=("default=ttft 1s",)), prefill=1)
    request = RouteRequest("r", 1, keys_of("doc", 16), 16 * 64 + 10, 10)
    assert isinstance(scene.state.route(request, scene.now), Rejection)
    again = RouteRequest("r", 2, keys_of("doc", 16), 16 * 64 + 10, 10, admitted=True)
    assert isinstance(scene.state.route(again, scene.now), Plan)


def test_the_decode_worker_is_asked_to_look_again_whatever_the_gate():
    keys = keys_of("doc", 1)
    for mode in GATES:
        scene = small_cluster(SchedulerSettings(admission=mode, classes=("default=tpot 500ms",)))  # type: ignore[arg-type]
        assert scene.plan("r", keys).tpot_max_s == 0.5
        assert small_cluster(SchedulerSettings(admission=mode)).plan("r", keys).tpot_max_s is None  # type: ignore[arg-type]


def test_what_should_decode_by_now_but_is_still_in_prefill_is_not_counted_as_decoding():
    late = [Stay(-5.0, 5.0, 1000) for _ in range(3)]
    assert batch_at(late, 0.0, 0.0) == (0.0, 0.0)
    assert batch_at([replace(stay, under_way=True) for stay in late], 0.0, 0.0) == (3.0, 3000.0)
    soon, _ = batch_at(late, 1.0, 0.0)
    assert soon == pytest.approx(3 * math.exp(-0.1))
    assert next_end(late, 0.0) == 0.0
