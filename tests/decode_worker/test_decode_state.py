"""The decode worker's decisions, driven by hand: every test reads as a story of events in and actions out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.state import Admit, CancelLoad, DecodeState, Fail, Finish, Load, Phase, Release, Sequence, WriteBack
from decode_worker.task import DecodeTask
from engine.sampling.params import SamplingParams
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import FailureCause, FinishReason
from kv_pool.keys import BlockKey, CacheRoot

BLOCK = 4
EOS = 99


def make_state(**changes: float) -> DecodeState:
    limits = {"block_tokens": BLOCK, "total_blocks": 32, "waiting_max": 4, "batch_max": 3, "handoff_timeout_s": 5.0} | changes
    return DecodeState(**limits)


def make_task(name: str = "a", tokens: int = 10, **changes: object) -> DecodeTask:
    task = DecodeTask(
        request_id=name,
        attempt=0,
        token_ids=tuple(range(tokens)),
        answered=0,
        keys=tuple(BlockKey(bytes([i]) * 16) for i in range(tokens // BLOCK)),
        tail_key=BlockKey(b"t" * 16),
        source=None,
        root=CacheRoot(b"r" * 32),
        max_new_tokens=8,
        sampling=SamplingParams(),
        eos_token_ids=(EOS,),
        sink=TokenSink("gateway-0", "inproc://none"),
        budget_s=100.0,
    )
    return replace(task, **changes)


def loading(state: DecodeState, task: DecodeTask, now: float = 0.0) -> Sequence:
    (admit,) = [a for a in state.submitted(task, now) if isinstance(a, Admit) and a.sequence.task is task]
    (load,) = state.admitted(admit.sequence, 0)
    assert load == Load(admit.sequence, 0)
    return admit.sequence


def running(state: DecodeState, task: DecodeTask, first: int = 50, now: float = 0.0) -> Sequence:
    sequence = loading(state, task, now)
    assert state.load_ended(sequence, True, "") == []
    assert state.joined(sequence, first, now) == []
    return sequence


def test_a_sequence_that_would_be_too_slow_is_turned_away_when_it_would_join():
    state = make_state()
    for limit, step_s, refused in ((None, 9.0, False), (0.1, 0.1, False), (0.1, 0.11, True)):
        sequence = loading(state, make_task(f"{limit}{step_s}", tpot_max_s=limit))
        assert state.load_ended(sequence, True, "") == []
        actions = state.joined(sequence, 50, 0.0, step_s)
        assert [a.cause for a in actions if isinstance(a, Fail)] == ([FailureCause.TOO_SLOW] if refused else [])
        assert (sequence.id in state.sequences) != refused
        assert (Release(sequence) in actions) == refused


@pytest.mark.parametrize(
    ("own", "theirs", "present_s", "step_s", "refused"),
    [
        (None, None, 0.05, 9.0, False),
        (None, 0.1, 0.05, 0.1, False),
        (None, 0.1, 0.05, 0.11, True),  # pushes the one that runs over its limit
        (None, 0.1, 0.10, 0.11, True),
        (None, 0.1, 0.12, 0.13, False),  # that one is over it already
        (0.12, 0.1, 0.12, 0.13, True),  # but its own limit counts
        (0.2, 0.1, 0.05, 0.15, True),  # a patient newcomer does not make the others patient
        (None, 0.1, math.inf, 0.15, False),  # not known
    ],
)
def test_whose_limit_counts_when_a_sequence_would_join(
    own: float | None, theirs: float | None, present_s: float, step_s: float, refused: bool
):
    state = make_state()
    there = running(state, make_task("there", tpot_max_s=theirs))
    newcomer = loading(state, make_task("new", tpot_max_s=own))
    assert state.load_ended(newcomer, True, "") == []
    actions = state.joined(newcomer, 50, 0.0, step_s, present_s)
    assert [a.cause for a in actions if isinstance(a, Fail)] == ([FailureCause.TOO_SLOW] if refused else [])
    assert (newcomer in state.running) != refused
    assert there in state.running


def test_an_answer_that_has_begun_is_not_turned_away_by_a_later_attempt():
    state = make_state()
    running(state, make_task("there", tpot_max_s=0.1))
    newcomer = loading(state, make_task("again", tpot_max_s=0.1, answered=2))
    assert state.load_ended(newcomer, True, "") == []
    assert not [a for a in state.joined(newcomer, 50, 0.0, 0.5, 0.05) if isinstance(a, Fail)]
    assert newcomer in state.running


@given(st.integers(1, 40), st.integers(1, 60), st.booleans(), st.lists(st.integers(0, 9), max_size=12))
def test_many_tokens_at_once_are_the_same_as_one_by_one(prompt: int, answer: int, write_back: bool, cuts: list[int]):
    task = make_task(tokens=prompt, max_new_tokens=answer + 1, write_back=write_back)
    one, many = make_state(total_blocks=1000), make_state(total_blocks=1000)
    single, bulk = running(one, task), running(many, task)
    singly = [action for token in range(answer) for action in one.drew(single, token)]
    at_once: list[object] = []
    left = list(range(answer))
    for count in [*cuts, answer]:
        taken, left = left[:count], left[count:]
        at_once += many.drew_many(bulk, taken)

    def shown(actions: list[object]) -> list[object]:
        return [a.block if isinstance(a, WriteBack) else type(a).__name__ for a in actions]

    assert shown(at_once) == shown(singly)
    assert bulk.drawn == single.drawn
    assert not one.sequences
    assert not many.sequences


def test_admission_asks_for_the_prompt_and_one_token_and_room_to_grow():
    state = make_state()
    (admit,) = state.submitted(make_task(tokens=8, max_new_tokens=40), 0.0)
    assert (admit.blocks, admit.room) == (3, 4)
    (admit,) = make_state().submitted(make_task(tokens=9, max_new_tokens=3), 0.0)
    assert (admit.blocks, admit.room) == (3, 0)


def test_tokens_up_to_the_limit_then_finish_and_release():
    state = make_state()
    sequence = running(state, make_task(tokens=9, max_new_tokens=4))
    assert sequence.answer_index == 1  # prefill drew the first
    assert state.drew(sequence, 51) == []
    assert state.drew(sequence, 52) == []
    done = state.drew(sequence, 53)
    assert done == [WriteBack(sequence, 2), Finish(sequence, FinishReason.LENGTH), Release(sequence)]
    assert not state.sequences


def test_eos_stops_unless_it_is_ignored():
    state = make_state()
    sequence = running(state, make_task())
    assert state.drew(sequence, EOS) == [Finish(sequence, FinishReason.STOP), Release(sequence)]
    state = make_state()
    sequence = running(state, make_task(sampling=SamplingParams(ignore_eos=True)))
    assert state.drew(sequence, EOS)[-1:] != [Release(sequence)]
    assert sequence.phase is Phase.RUNNING


def test_a_first_token_that_ends_the_answer_was_reported_by_prefill():
    state = make_state()
    sequence = loading(state, make_task())
    state.load_ended(sequence, True, "")
    assert state.joined(sequence, EOS, 0.0) == [Release(sequence)]


def test_generated_blocks_are_written_back_when_their_kv_is_complete():
    state = make_state()
    sequence = running(state, make_task(tokens=6, max_new_tokens=8))  # 6 tokens with K/V, the first answer token without
    backs = []
    for token in range(60, 66):
        backs += [(a.block, sequence.kv_tokens) for a in state.drew(sequence, token) if isinstance(a, WriteBack)]
    assert backs == [(1, 7), (2, 11)] or backs == [(1, 8), (2, 12)]


def test_no_write_back_where_it_is_off():
    state = make_state()
    sequence = running(state, make_task(tokens=6, write_back=False))
    assert not [a for token in range(60, 66) for a in state.drew(sequence, token) if isinstance(a, WriteBack)]


def test_a_continued_answer_counts_what_was_answered_before():
    state = make_state()
    sequence = running(state, make_task(tokens=10, answered=3, max_new_tokens=5))
    assert sequence.answer_index == 4
    assert state.drew(sequence, 51)[0] == Finish(sequence, FinishReason.LENGTH)


def test_a_short_load_is_a_failed_handoff():
    state = make_state()
    sequence = loading(state, make_task())
    assert state.load_ended(sequence, False, "1 of 3") == [Fail(sequence, FailureCause.HANDOFF, "1 of 3"), Release(sequence)]


def test_silence_after_the_first_block_ends_the_wait():
    state = make_state()
    sequence = loading(state, make_task())
    assert state.tick(50.0) == []  # prefill may queue: the request's deadline bounds that
    state.loaded(sequence, 50.0)
    assert state.tick(54.0) == []
    fail, cancel = state.tick(55.5)
    assert fail.cause is FailureCause.HANDOFF
    assert cancel == CancelLoad(sequence)
    assert state.load_ended(sequence, False, "late") == [Release(sequence)]


def test_the_youngest_gives_way():
    state = make_state()
    old, young = running(state, make_task("old"), now=1.0), running(state, make_task("young"), now=2.0)
    fail, release = state.out_of_blocks()
    assert (fail.sequence, fail.cause, release) == (young, FailureCause.PREEMPTED, Release(young))
    assert state.running == [old]


def test_a_newcomer_that_still_loads_gives_way_before_the_oldest():
    state = make_state()
    old, new = running(state, make_task("old"), now=1.0), loading(state, make_task("new"), now=2.0)
    fail, cancel = state.out_of_blocks()
    assert (fail.sequence, cancel) == (new, CancelLoad(new))
    assert state.running == [old]
    assert state.blocks_on_their_way_back
    assert state.load_ended(new, False, "late") == [Release(new)]
    assert not state.blocks_on_their_way_back


def test_what_can_never_fit_is_refused_at_once():
    (fail,) = make_state(total_blocks=3).submitted(make_task(tokens=10, max_new_tokens=8), 0.0)
    assert fail.cause is FailureCause.REFUSED
    assert "18 tokens" in fail.detail


@pytest.mark.parametrize(("field", "value"), [("max_new_tokens", 0), ("keys", ())])
def test_a_contradictory_task_is_named(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        make_state().submitted(replace(make_task(), **{field: value}), 0.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_every_admitted_sequence_is_released_exactly_once(data: st.DataObject):
    state = make_state(waiting_max=8)
    admitted: list[tuple[str, int]] = []
    released: list[tuple[str, int]] = []
    loads: list[Sequence] = []
    now = 0.0

    def run(actions: list[object]) -> None:
        queue = list(actions)
        while queue:
            match queue.pop(0):
                case Admit(sequence, _, _) if sequence.phase is Phase.WAITING:
                    if data.draw(st.booleans(), label="room"):
                        admitted.append(sequence.id)
                        queue += state.admitted(sequence, 0)
                case Load(sequence, _):
                    loads.append(sequence)
                case Release(sequence):
                    assert sequence.transfers == 0
                    released.append(sequence.id)

    for i in range(data.draw(st.integers(5, 40))):
        now += 0.5
        match data.draw(st.sampled_from(["submit", "load", "load", "step", "step", "abort", "tick", "full", "fence"])):
            case "submit":
                run(
                    state.submitted(
                        make_task(f"r{i}", data.draw(st.integers(1, 30)), max_new_tokens=data.draw(st.integers(1, 9))), now
                    )
                )
            case "load" if loads:
                sequence = loads.pop(data.draw(st.integers(0, len(loads) - 1)))
                ok = data.draw(st.booleans())
                run(state.load_ended(sequence, ok, "lost"))
                if ok and sequence.phase is Phase.LOADING:
                    run(state.joined(sequence, data.draw(st.sampled_from([1, EOS])), now))
            case "step":
                for sequence in state.running:
                    run(state.drew(sequence, data.draw(st.sampled_from([1, 2, EOS]))))
            case "abort" if state.sequences:
                run(state.aborted(data.draw(st.sampled_from(sorted(state.sequences)))))
            case "tick":
                run(state.tick(now))
            case "full" if state.running:
                run(state.out_of_blocks())
            case "fence":
                run(state.fenced())
        assert len(state.running) <= state.batch_max
    run(state.fenced())
    while loads:
        run(state.load_ended(loads.pop(), False, "lost"))
        run(state.fenced())
    assert not state.sequences
    assert sorted(released) == sorted(admitted)
