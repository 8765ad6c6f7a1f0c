"""Prompts with a common beginning at one worker: who waits for whom, and that nobody does what a sibling is just doing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import FailureCause
from kv_pool.keys import BlockKey
from prefill_worker.policy.in_order import InOrder
from prefill_worker.siblings import common_blocks
from prefill_worker.state import (
    Admit,
    Fail,
    HandOver,
    Load,
    Phase,
    PrefillState,
    Prompt,
    Publish,
    Release,
    RequestId,
)
from prefill_worker.task import PrefillTask

BLOCK, CHUNK = 4, 16


def make_task(name: str, path: str, tail: int = 1, **changes: Any) -> PrefillTask:
    """A prompt of one block for each letter of ``path`` and ``tail`` tokens more. Keys name all that came before."""
    keys = tuple(BlockKey(path[: i + 1].rjust(16).encode()) for i in range(len(path)))
    fields: dict[str, Any] = {
        "request_id": name, "attempt": 0, "token_ids": tuple(range(len(path) * BLOCK + tail)), "answered": 0, "keys": keys,
        "cached_blocks": 0, "source": None, "tail_key": BlockKey(b"t" * 16), "hand_over": True, "sampling": SamplingParams(),
        "eos_token_ids": (), "sink": TokenSink("gateway-0", "inproc://none"), "budget_s": 1000.0,
    }  # fmt: skip
    return PrefillTask(**fields | changes)


@dataclass
class Shell:
    """What is around the state, as dumb as can be: a device cache of names, a pool of names, transfers that end when told."""

    state: PrefillState
    capacity: int = 10_000
    pool: set[BlockKey] = field(default_factory=set)
    device: set[BlockKey] = field(default_factory=set)
    """Named blocks, whether somebody holds them or not."""
    holding: dict[RequestId, Prompt] = field(default_factory=dict)
    open: list[tuple[str, Prompt, int, int]] = field(default_factory=list)
    computed: list[tuple[Prompt, int]] = field(default_factory=list)
    """(who, which block), oldest first."""
    loaded: list[tuple[Prompt, int]] = field(default_factory=list)
    failed: list[tuple[str, FailureCause]] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    admitted: dict[RequestId, int] = field(default_factory=dict)
    """Who came how many-th."""
    now: float = 0.0

    def do(self, actions: list[Any]) -> None:
        queue, blocked = list(actions), False
        while queue:
            match queue.pop(0):
                case Admit(prompt):
                    if prompt.phase is Phase.WAITING and not blocked:
                        room = self.capacity - sum(-(-p.total // BLOCK) for p in self.holding.values())
                        blocked = -(-prompt.total // BLOCK) > room
                        if not blocked:
                            queue += self._admit(prompt)
                case Load(prompt, first, last):
                    self.open.append(("load", prompt, first, last))
                    self.loaded += [(prompt, i) for i in range(first, last) if prompt.task.keys[i] in self.pool]
                case Publish(prompt, first, last):
                    self.open.append(("publish", prompt, first, last))
                case HandOver(prompt):
                    self.open.append(("publish", prompt, 0, 0))
                case Release(prompt):
                    assert prompt.transfers == 0
                    del self.holding[prompt.id]
                case Fail(prompt, cause, _):
                    self.failed.append((prompt.task.request_id, cause))

    def _admit(self, prompt: Prompt) -> list[Any]:
        hits = 0
        for key in prompt.task.keys[: self.state.sharable_blocks(prompt)]:
            if key not in self.device:
                break
            hits += 1
        self.holding[prompt.id] = prompt
        self.admitted[prompt.id] = len(self.admitted)
        return self.state.admitted(prompt, hits, self.now)

    def submit(self, name: str, path: str, tail: int = 1, **changes: Any) -> None:
        self.do(self.state.submitted(make_task(name, path, tail, **changes), self.now))

    def piece(self) -> str | None:
        """Whose piece was run."""
        piece = self.state.next_piece()
        if piece is None:
            return None
        blocks = range(piece.start // BLOCK, piece.end // BLOCK)
        self.computed += [(piece.prompt, i) for i in blocks]
        self.device |= {piece.prompt.task.keys[i] for i in blocks}
        self.finished[piece.prompt.task.request_id] += piece.last
        self.do(self.state.computed(piece, 0.1))
        return piece.prompt.task.request_id

    def transfer(self, place: int = 0, whole: bool = True) -> None:
        kind, prompt, first, last = self.open.pop(place)
        keys = prompt.task.keys
        if kind == "publish":
            self.pool |= set(keys[first:last]) if whole else set()
            self.do(self.state.published(prompt, whole, ""))
            return
        good = first
        while whole and good < last and keys[good] in self.pool:
            good += 1
        self.device |= set(keys[first:good])
        self.do(self.state.load_ended(prompt, good, self.now))

    def phases(self) -> dict[str, Phase]:
        return {name: p.phase for (name, _), p in self.state.prompts.items()}

    def evict(self) -> None:
        """All that nobody holds. (A prompt's own blocks count as in place only as far as it says.)"""
        self.device &= {key for p in self.holding.values() for key in p.task.keys}


def make_shell(running_max: int = 4, order: Any = "shortest", **changes: Any) -> Shell:
    state = PrefillState(BLOCK, CHUNK, waiting_max=16, running_max=running_max, order=InOrder(order))
    return Shell(state, **changes)


def computing(shell: Shell, name: str, path: str, **changes: Any) -> None:
    """``name`` has been admitted, and nothing was cached."""
    shell.submit(name, path, **changes)
    shell.transfer(len(shell.open) - 1)
    assert shell.phases()[name] is Phase.COMPUTING


def test_a_sibling_waits_without_blocks_and_then_computes_only_its_own_part():
    shell = make_shell()
    computing(shell, "first", "aaaaaaaab")
    shell.submit("second", "aaaaaaaac")
    assert shell.phases()["second"] is Phase.WAITING
    assert list(shell.holding) == [("first", 0)]
    assert [shell.piece(), shell.phases()["second"]] == ["first", Phase.WAITING]  # blocks 0..3 of the 8 that are common
    assert shell.piece() == "first"
    second = shell.state.prompts["second", 0]
    assert second.phase is Phase.LOADING  # its last block may be in the pool
    assert second.blocks_in_place == 8


def test_what_the_sibling_will_not_have_is_not_waited_for():
    shell = make_shell()
    computing(shell, "first", "aaaab")
    shell.piece()
    shell.submit("second", "aaaac")
    shell.submit("other", "xx")
    assert shell.phases() == {"first": Phase.COMPUTING, "second": Phase.LOADING, "other": Phase.LOADING}


def test_a_load_under_way_is_waited_for_too():
    shell = make_shell()
    shell.pool = set(make_task("x", "aaaaaaaa").keys)
    shell.submit("first", "aaaaaaaab")
    shell.submit("second", "aaaaaaaa", tail=3)
    assert shell.phases() == {"first": Phase.LOADING, "second": Phase.WAITING}
    shell.transfer()
    assert shell.phases()["second"] is Phase.COMPUTING  # straight from the device
    assert shell.state.prompts["second", 0].cached == 8 * BLOCK


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.COMPUTING])
@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_where_the_sibling_ends_the_waiting_one_goes_on_by_itself(phase: Phase, end: str):
    shell = make_shell()
    shell.submit("first", "aaaaaaaab", budget_s=5.0)
    if phase is Phase.COMPUTING:
        shell.transfer()
        shell.piece()
    shell.submit("second", "aaaaaaaac")
    assert shell.phases() == {"first": phase, "second": Phase.WAITING}
    shell.do(shell.state.aborted(("first", 0)) if end == "abort" else shell.state.tick(5.0))
    assert shell.phases()["first"] is Phase.ENDING  # a transfer still touches its blocks: that is no reason to wait
    second = shell.state.prompts["second", 0]
    assert second.phase is Phase.LOADING
    assert second.blocks_in_place == (4 if phase is Phase.COMPUTING else 0)


def test_one_that_waits_can_be_aborted_and_runs_out_of_time():
    shell = make_shell()
    computing(shell, "first", "aaaaaaaab")
    shell.submit("second", "aaaaaaaac")
    shell.submit("third", "aaaaaaaad", budget_s=3.0)
    shell.do(shell.state.aborted(("second", 0)))
    shell.do(shell.state.tick(3.0))
    assert shell.failed == [("third", FailureCause.DEADLINE)]
    assert list(shell.phases()) == ["first"]
    assert not shell.state.held


def test_a_leader_goes_first_for_as_long_as_an_urgent_prompt_waits_for_it():
    shell = make_shell()
    computing(shell, "long", "aaaaaaaa" + "b" * 40)
    computing(shell, "short", "ssssssss")
    assert shell.state.next_piece().prompt.task.request_id == "short"
    shell.submit("urgent", "aaaaaaaac", priority=5)
    assert [shell.piece(), shell.piece()] == ["long", "long"]
    shell.transfer(len(shell.open) - 1)
    assert shell.phases()["urgent"] is Phase.COMPUTING
    assert [shell.piece(), shell.piece()] == ["urgent", "short"]


def test_those_who_wait_keep_their_places_but_hold_up_nobody_who_goes_before_them():
    shell = make_shell(running_max=3)
    computing(shell, "first", "aaaaaaaab" + "b" * 20)
    for name in "cdef":
        shell.submit(name, "aaaaaaaa" + name)
    assert [held.task.request_id for held, _ in shell.state.held] == ["c", "d"]
    shell.submit("late", "x" * 12)
    assert shell.phases()["late"] is Phase.WAITING
    shell.submit("urgent", "y" * 12, priority=5)
    assert shell.phases()["urgent"] is Phase.LOADING


def test_while_nothing_computes_others_pass_those_who_wait():
    """The leader still loads: an idle device must not wait with its siblings."""
    shell = make_shell(running_max=4)
    shell.submit("leader", "aaaaaaaab")
    assert shell.phases()["leader"] is Phase.LOADING
    for name in "cdef":
        shell.submit(name, "aaaaaaaa" + name)
    shell.submit("other", "", tail=3)
    assert shell.phases()["other"] is Phase.COMPUTING


def test_two_that_come_together_are_not_admitted_together():
    shell = make_shell(running_max=2)
    computing(shell, "busy", "b" * 9)
    computing(shell, "busier", "z" * 9)
    for name in ("first", "second"):
        shell.submit(name, "aaaaaaaa" + name[0])
    shell.do([*shell.state.aborted(("busy", 0)), *shell.state.aborted(("busier", 0))])
    while shell.open:
        shell.transfer()
    assert shell.phases() == {"first": Phase.COMPUTING, "second": Phase.WAITING}


def test_in_bitwise_mode_only_whole_chunks_are_worth_waiting_for():
    shell = make_shell()
    computing(shell, "first", "aaaaaabbb", reusable_only_at_chunks=True)  # 4 of the 6 common blocks are a chunk
    shell.submit("second", "aaaaaaccc", reusable_only_at_chunks=True)
    assert shell.phases()["second"] is Phase.WAITING
    shell.piece()
    second = shell.state.prompts["second", 0]
    assert (second.phase, second.blocks_in_place) == (Phase.LOADING, 4)


def test_the_last_token_is_computed_by_each_and_so_not_waited_for():
    shell = make_shell()
    computing(shell, "first", "aaaaa", tail=0)
    shell.submit("second", "aaaaa", tail=0)
    assert [shell.piece(), shell.phases()["first"]] == ["first", Phase.COMPUTING]
    assert shell.phases()["second"] is Phase.COMPUTING
    assert shell.state.prompts["second", 0].cached == 4 * BLOCK


def test_the_device_cache_is_used_whatever_the_plan_says_of_loads():
    shell = make_shell()
    shell.device = set(make_task("x", "aaaaaaaa").keys)
    shell.submit("first", "aaaaaaaab", load_max_blocks=2)
    prompt = shell.state.prompts["first", 0]
    assert (prompt.phase, prompt.cached) == (Phase.COMPUTING, 8 * BLOCK)
    assert not shell.loaded


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_common_blocks_are_those_of_a_plain_count(left: str, right: str):
    a, b = make_task("a", left).keys, make_task("b", right).keys
    plain = 0
    while plain < min(len(a), len(b)) and a[plain] == b[plain]:
        plain += 1
    assert common_blocks(a, b) == plain


class Twin:
    """Watches from outside, and counts everything: nobody does what a sibling has done, or is doing, who is still alive and was
    admitted before. (That one may do what somebody behind it has done: a load that it counted on can fail.)"""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._done: list[tuple[Prompt, int]] = []
        self._seen = [0, 0]

    def look(self) -> None:
        for which, record in enumerate((self._shell.computed, self._shell.loaded)):
            for prompt, block in record[self._seen[which] :]:
                self._judge(prompt, block)
                self._done.append((prompt, block))
            self._seen[which] = len(record)

    def _judge(self, prompt: Prompt, block: int) -> None:
        for other, done in self._done:
            alive = other.id in self._shell.state.prompts and other.phase is not Phase.ENDING
            if done == block and other is not prompt and alive and other.task.keys[done] == prompt.task.keys[block]:
                earlier, later = sorted((prompt, other), key=lambda p: self._shell.admitted[p.id])
                assert block >= self._worth_sharing(later, earlier), f"{later.id} does block {block} of {earlier.id} itself"

    def _worth_sharing(self, a: Prompt, b: Prompt) -> int:
        common = [x == y for x, y in zip(a.task.keys, b.task.keys, strict=False)]
        blocks = min([*(i for i, same in enumerate(common) if not same), len(common), (a.total - 1) // BLOCK])
        return blocks - blocks % (CHUNK // BLOCK) if a.task.reusable_only_at_chunks else blocks


PATHS = st.builds(
    lambda stem, length, own: ("abcd"[stem] * 10)[:length] + own,
    st.integers(0, 1), st.integers(0, 10), st.text("xy", max_size=3),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_prompt_ends_and_no_block_is_made_twice_while_a_sibling_has_it(data: st.DataObject):
    bitwise = data.draw(st.booleans(), label="bitwise")
    shell = make_shell(
        running_max=data.draw(st.integers(1, 4), label="running_max"), order=data.draw(st.sampled_from(["shortest", "fcfs"])),
        capacity=data.draw(st.sampled_from([14, 30, 1000]), label="capacity"),
    )  # fmt: skip
    twin, submitted, gone = Twin(shell), list[str](), set[str]()
    for i in range(data.draw(st.integers(4, 50), label="events")):
        shell.now += 0.5
        match data.draw(
            st.sampled_from(["submit", "submit", "piece", "piece", "transfer", "transfer", "abort", "tick", "evict"])
        ):
            case "submit":
                name, path, tail = f"r{i}", data.draw(PATHS), data.draw(st.integers(0, 3))
                if path or tail:
                    shell.submit(
                        name, path, tail, reusable_only_at_chunks=bitwise, priority=data.draw(st.integers(-1, 2)),
                        load_max_blocks=data.draw(st.sampled_from([None, None, 0, 3])), hand_over=data.draw(st.booleans()),
                        cached_blocks=data.draw(st.integers(0, 9)), budget_s=data.draw(st.sampled_from([1000.0, 6.0])),
                    )  # fmt: skip
                    submitted.append(name)
            case "piece":
                shell.piece()
            case "transfer" if shell.open:
                shell.transfer(data.draw(st.integers(0, len(shell.open) - 1)), data.draw(st.sampled_from([True, True, False])))
            case "abort" if shell.state.prompts:
                request = data.draw(st.sampled_from(sorted(shell.state.prompts)))
                gone.add(request[0])
                shell.do(shell.state.aborted(request))
            case "tick":
                shell.do(shell.state.tick(shell.now))
            case "evict":
                shell.evict()
        twin.look()
        admitted = {p.id for p in shell.state.prompts.values() if p.phase is not Phase.WAITING}
        assert set(shell.holding) == admitted  # who waits has nothing
    # From here on nothing fails and time stands still: all that is left must come to its end by itself.
    while shell.state.prompts:
        before = len(shell.computed), len(shell.open), len(shell.state.prompts), shell.finished.total(), shell.phases()
        if shell.piece() is None:
            if shell.open:
                shell.transfer()
            else:
                shell.do(shell.state.tick(shell.now))
        twin.look()
        after = len(shell.computed), len(shell.open), len(shell.state.prompts), shell.finished.total(), shell.phases()
        assert before != after or shell.state.next_piece() is not None, "everybody waits for somebody"
    failed = {name for name, _ in shell.failed}
    assert {name for name in submitted if shell.finished[name] != 1} <= failed | gone
    assert not shell.holding
    assert not shell.open
