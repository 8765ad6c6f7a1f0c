"""The prefill worker's decisions, driven by hand: every test reads as a story of events in and actions out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import FailureCause
from kv_pool.keys import BlockKey
from prefill_worker.policy.in_order import FIRST_GUESS_S, InOrder
from prefill_worker.state import Admit, CancelLoad, Fail, HandOver, Load, Phase, PrefillState, Publish, Release
from prefill_worker.task import HEAD_START_MAX_S, PATIENCE, PRIORITY_S, PrefillTask, precedence

BLOCK, CHUNK = 4, 16


def make_state(**changes: int) -> PrefillState:
    limits = {"block_tokens": BLOCK, "chunk_tokens": CHUNK, "waiting_max": 4, "running_max": 2} | changes
    return PrefillState(order=InOrder("shortest"), **limits)


def make_task(name: str = "a", tokens: int = 40, **changes: object) -> PrefillTask:
    task = PrefillTask(
        request_id=name,
        attempt=0,
        token_ids=tuple(range(tokens)),
        answered=0,
        keys=tuple(BlockKey(name.encode().rjust(8) + i.to_bytes(8)) for i in range(tokens // BLOCK)),  # of no sibling
        cached_blocks=0,
        source=None,
        tail_key=BlockKey(b"t" * 16),
        hand_over=True,
        sampling=SamplingParams(),
        eos_token_ids=(),
        sink=TokenSink("gateway-0", "inproc://none"),
        budget_s=100.0,
    )
    return replace(task, **changes)


def admit(state: PrefillState, task: PrefillTask, device_blocks: int = 0, now: float = 0.0) -> list[object]:
    (action,) = [a for a in state.submitted(task, now) if isinstance(a, Admit) and a.prompt.task is task]
    return list(state.admitted(action.prompt, device_blocks, now))


def test_pieces_end_at_absolute_multiples_of_the_chunk():
    state = make_state()
    (load,) = admit(state, make_task(tokens=40))
    assert load == Load(load.prompt, 0, 9)  # 39 of 40 tokens may come from a cache: one is computed for its logits
    state.load_ended(load.prompt, blocks=1, now=0.0)
    borders = []
    while (piece := state.next_piece()) is not None:
        borders.append((piece.start, piece.end))
        state.computed(piece, 0.1)
    assert borders == [(4, 16), (16, 32), (32, 40)]


def test_full_blocks_go_out_after_each_piece_and_the_tail_last():
    state = make_state()
    (load,) = admit(state, make_task(tokens=38))
    assert state.load_ended(load.prompt, 2, 0.0) == [Publish(load.prompt, 0, 2)]  # reused ones are offered as well
    ranges = []
    while (piece := state.next_piece()) is not None:
        ranges += state.computed(piece, 0.1)
    assert ranges == [Publish(load.prompt, 2, 4), Publish(load.prompt, 4, 8), Publish(load.prompt, 8, 9), HandOver(load.prompt)]
    assert load.prompt.phase is Phase.HANDING_OVER
    outcomes = [state.published(load.prompt, True, "") for _ in range(5)]
    assert outcomes[:4] == [[], [], [], []]
    assert outcomes[4] == [Release(load.prompt)]
    assert not state.prompts


def test_bitwise_mode_reuses_whole_chunks_only():
    state = make_state()
    (load,) = admit(state, make_task(tokens=40, reusable_only_at_chunks=True))
    assert (load.first, load.last) == (0, 8)
    state.load_ended(load.prompt, blocks=7, now=0.0)
    assert load.prompt.cached == 16


def test_a_failed_publish_fails_the_attempt_once_and_frees_after_the_last_transfer():
    state = make_state()
    (load,) = admit(state, make_task(tokens=40))
    state.load_ended(load.prompt, 0, 0.0)
    actions = []
    while (piece := state.next_piece()) is not None:
        actions += state.computed(piece, 0.1)
    assert len(actions) == 4
    first = state.published(load.prompt, False, "no room")
    assert first == [Fail(load.prompt, FailureCause.HANDOFF, "no room")]
    assert [state.published(load.prompt, False, "no room") for _ in range(3)] == [[], [], [Release(load.prompt)]]


def test_an_abort_while_loading_cancels_and_waits_for_the_transfer():
    state = make_state()
    (load,) = admit(state, make_task())
    assert state.aborted(("a", 0)) == [CancelLoad(load.prompt)]
    assert state.next_piece() is None
    assert state.load_ended(load.prompt, 3, 1.0) == [Release(load.prompt)]


def test_an_abort_while_waiting_touches_no_block():
    state = make_state(running_max=1)
    admit(state, make_task("a"))
    assert state.submitted(make_task("b"), 0.0) == []
    assert state.aborted(("b", 0)) == []
    assert list(state.prompts) == [("a", 0)]


def test_the_queue_is_bounded_and_a_repeat_is_not_a_second_request():
    state = make_state(waiting_max=2, running_max=1)
    admit(state, make_task("a"))
    for name in "bc":
        assert state.submitted(make_task(name), 0.0) == []
    assert state.submitted(make_task("b"), 0.0) == []
    (refusal,) = state.submitted(make_task("d"), 0.0)
    assert isinstance(refusal, Fail)
    assert refusal.cause is FailureCause.REFUSED


def test_deadline_ends_a_prompt_in_any_phase():
    state = make_state(running_max=1)
    (load,) = admit(state, make_task("a", budget_s=5.0))
    state.submitted(make_task("b", budget_s=4.0), 0.0)
    causes = [a.cause for a in state.tick(5.0) if isinstance(a, Fail)]
    assert causes == [FailureCause.DEADLINE, FailureCause.DEADLINE]
    assert state.load_ended(load.prompt, 0, 5.0) == [Release(load.prompt)]
    assert not state.prompts


@pytest.mark.parametrize(("field", "value"), [("token_ids", ()), ("keys", ())])
def test_a_contradictory_task_is_named(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        make_state().submitted(replace(make_task(), **{field: value}), 0.0)


def test_short_prompts_overtake_long_ones_but_not_for_ever():
    state = make_state(running_max=3)
    prompts = {}
    for name, tokens, at in (("long", 2000, 0.0), ("short", 40, 1.0)):
        (load,) = admit(state, make_task(name, tokens), now=at)
        state.load_ended(load.prompt, 0, at)
        prompts[name] = load.prompt
    assert state.next_piece().prompt is prompts["short"]
    much_later = PATIENCE * 2000 * FIRST_GUESS_S
    (late,) = admit(state, make_task("late", 40), now=much_later)
    state.aborted(("short", 0))
    state.load_ended(late.prompt, 0, much_later)
    assert state.next_piece().prompt is prompts["long"]


def test_first_come_first_served_is_an_order_too():
    state = PrefillState(order=InOrder("fcfs"), block_tokens=BLOCK, chunk_tokens=CHUNK, waiting_max=4, running_max=3)
    for name, tokens, at in (("long", 2000, 0.0), ("short", 40, 1.0)):
        (load,) = admit(state, make_task(name, tokens), now=at)
        state.load_ended(load.prompt, 0, at)
    assert state.next_piece().prompt.task.request_id == "long"


def test_a_higher_priority_goes_first_whatever_its_length_but_only_for_so_long():
    state = make_state(running_max=3)
    (load,) = admit(state, make_task("short", 40), now=0.0)
    state.load_ended(load.prompt, 0, 0.0)
    soon = PRIORITY_S / 4
    (load,) = admit(state, make_task("urgent", 400, priority=1), now=soon)
    state.load_ended(load.prompt, 0, soon)
    assert state.next_piece().prompt.task.request_id == "urgent"
    state.aborted(("urgent", 0))
    (load,) = admit(state, make_task("too-late", 400, priority=1), now=2 * PRIORITY_S)
    state.load_ended(load.prompt, 0, 2 * PRIORITY_S)
    assert state.next_piece().prompt.task.request_id == "short"


@given(st.sampled_from(["fcfs", "shortest"]), st.floats(0, 1e6), st.floats(0, 1e4), st.integers(-1000, 1000))
def test_nothing_starves(order: str, arrived: float, work: float, priority: int):
    """Whatever comes later than the head start and the patience that a prompt's work asks for goes behind it."""
    late = arrived + PATIENCE * work + 2 * HEAD_START_MAX_S + 1.0
    assert precedence(order, arrived, work, priority) < precedence(order, late, 0.0, 1000)


def test_the_order_learns_how_long_a_token_takes():
    """At 10 ms a token the long prompt is 20 s of work, so that even what comes 30 s later goes first."""
    state = make_state(running_max=3)
    for _ in range(40):
        state.order.observe(100, 1.0)
    for name, tokens, at in (("long", 2000, 0.0), ("short", 40, 30.0)):
        (load,) = admit(state, make_task(name, tokens), now=at)
        state.load_ended(load.prompt, 0, at)
    assert state.next_piece().prompt.task.request_id == "short"


def test_a_long_prompt_that_is_cached_is_short_work_while_it_waits():
    state = make_state(running_max=1)
    (busy,) = admit(state, make_task("busy", 40), now=0.0)
    state.load_ended(busy.prompt, 0, 0.0)
    state.submitted(make_task("cold", 200), 1.0)
    state.submitted(make_task("warm", 400, cached_blocks=99), 1.0)
    (_, admitted) = state.aborted(("busy", 0))
    assert isinstance(admitted, Admit)
    assert admitted.prompt.task.request_id == "warm"
    assert state.queued_tokens == 600  # what is reported does not rest on a belief


@pytest.mark.parametrize(("cached", "limit", "work"), [(0, None, 40), (5, None, 20), (99, None, 4), (5, 2, 32), (-3, None, 40)])
def test_the_work_that_is_foreseen_is_never_less_than_what_must_be_computed(cached: int, limit: int | None, work: int):
    state = make_state(running_max=0)
    state.submitted(make_task(tokens=40, cached_blocks=cached, load_max_blocks=limit), 0.0)
    (prompt,) = state.prompts.values()
    assert prompt.work == work


def test_no_more_blocks_are_loaded_than_the_plan_says():
    (admitted,) = make_state().submitted(make_task(tokens=40, load_max_blocks=3), 0.0)
    state = make_state()
    (load,) = admit(state, make_task(tokens=40, load_max_blocks=3), now=0.0)
    assert (load.first, load.last) == (0, 3)
    assert isinstance(admitted, Admit)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_every_admitted_prompt_is_released_exactly_once(data: st.DataObject):
    state = make_state(running_max=3, waiting_max=8)
    admitted: set[tuple[str, int]] = set()
    released: list[tuple[str, int]] = []
    open_transfers: list[tuple[str, object]] = []
    now = 0.0

    def run(actions: list[object]) -> None:
        queue = list(actions)
        while queue:
            action = queue.pop(0)
            match action:
                case Admit(prompt) if prompt.phase is Phase.WAITING:
                    if data.draw(st.booleans(), label="room"):
                        admitted.add(prompt.id)
                        queue += state.admitted(prompt, data.draw(st.integers(0, state.reusable_blocks(prompt) // 1)), now)
                case Load(prompt, _, _):
                    open_transfers.append(("load", prompt))
                case Publish(prompt, _, _) | HandOver(prompt):
                    open_transfers.append(("publish", prompt))
                case Release(prompt):
                    assert prompt.transfers == 0
                    released.append(prompt.id)

    for i in range(data.draw(st.integers(5, 40))):
        now += 0.5
        match data.draw(st.sampled_from(["submit", "piece", "transfer", "transfer", "abort", "tick", "fence"])):
            case "submit":
                task = make_task(f"r{i}", data.draw(st.integers(1, 60)), budget_s=data.draw(st.floats(1, 50)))
                run(state.submitted(task, now))
            case "piece":
                if (piece := state.next_piece()) is not None:
                    run(state.computed(piece, 0.1))
            case "transfer" if open_transfers:
                kind, prompt = open_transfers.pop(data.draw(st.integers(0, len(open_transfers) - 1)))
                ok = data.draw(st.booleans())
                run(state.load_ended(prompt, 0, now) if kind == "load" else state.published(prompt, ok, "lost"))
            case "abort" if state.prompts:
                run(state.aborted(data.draw(st.sampled_from(sorted(state.prompts)))))
            case "tick":
                run(state.tick(now))
            case "fence":
                run(state.fenced())
        for prompt in state.prompts.values():
            assert 0 <= prompt.cached <= prompt.computed <= prompt.total
    run(state.fenced())
    while open_transfers:
        kind, prompt = open_transfers.pop()
        run(state.load_ended(prompt, 0, now) if kind == "load" else state.published(prompt, False, "lost"))
        run(state.fenced())
    assert not state.prompts
    assert sorted(released) == sorted(admitted)
