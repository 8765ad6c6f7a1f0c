"""The scheduler against a dumb twin (``state_twin.py``), under every routing policy: reports, events, routes, ends and failures
in any order, lost, late and repeated. The twin does not know where a request will go; it knows where it may, and what is open
then."""

from __future__ import annotations

import sys
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scheduler_scene import BLOCK_TOKENS, FakeNode, FakeSnapshot, keys_of
from state_twin import Attempt, Books, Copies, Routed, content_after, recount

from decode_worker.task import DecodeLoad
from kv_pool.events.types import DRAM, SSD, AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from prefill_worker.task import PrefillLoad
from scheduler.members import Member
from scheduler.messages import (
    Action,
    BlocksChanged,
    Event,
    FetchSnapshot,
    Reply,
    RequestEnded,
    SnapshotArrived,
    SnapshotFailed,
    Tick,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.state import SchedulerState

POLICIES = get_args(SchedulerSettings.model_fields["policy"].annotation)
NODES = ("n0", "n1")
WORKERS = {"p0": "n0", "p1": "n1", "d0": "n0", "d1": "n1"}
"""With the node that each is attached to."""
REQUESTS = 6
BLOCKS = 1000
LIFE_S = 12.0
PEACE_BEATS = 45
"""Of a second: longer than any request lives, and than a question for a snapshot stays open that nobody answers."""
DOCS = {name: keys_of(name, 6) for name in ("a", "b")}
KEYS = [key for keys in DOCS.values() for key in keys]

seldom = st.sampled_from([False] * 5 + [True])
workers = st.sampled_from(sorted(WORKERS))
nodes = st.sampled_from(NODES)
members = st.sampled_from([*sorted(WORKERS), *NODES])
media = st.sampled_from([DRAM, SSD])
key_sets = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True).map(tuple)
answers = st.sampled_from([1, 64, 64])
"""Tokens to generate: of one, prefill is the whole request."""
Prompt = tuple[int, str, int, int, int]
prompts: st.SearchStrategy[Prompt] = st.tuples(
    st.integers(0, REQUESTS - 1), st.sampled_from(sorted(DOCS)), st.integers(0, 6), st.integers(0, BLOCK_TOKENS - 1), answers
)
block_events: st.SearchStrategy[BlockEvent] = st.one_of(
    st.builds(BlockStored, key_sets, st.none(), st.just(BLOCK_TOKENS), media),
    st.builds(lambda doc, count, medium: BlockStored(DOCS[doc][:count], None, BLOCK_TOKENS, medium),
              st.sampled_from(sorted(DOCS)), st.integers(1, 6), media),
    st.builds(BlockRemoved, key_sets, media),
    st.just(AllBlocksCleared()),
)  # fmt: skip


class Node(FakeNode):
    """A pool node of one incarnation, and all that it ever published."""

    def __init__(self, node_id: str, incarnation: str) -> None:
        super().__init__(node_id, incarnation)
        self.batches: list[EventBatch] = []
        self.snapshots: list[FakeSnapshot] = []

    def publish(self, events: tuple[BlockEvent, ...]) -> EventBatch:
        self.sequence += 1
        self.batches.append(EventBatch(self.sequence, self.id, self.incarnation, 0.0, events))
        return self.batches[-1]

    def content(self) -> Copies:
        return content_after(self.batches, self.sequence)

    def snapshot(self) -> FakeSnapshot:
        by_medium = {medium: frozenset(k for m, k in self.content() if m == medium) for medium in (DRAM, SSD)}
        self.snapshots.append(FakeSnapshot(self.id, self.incarnation, self.sequence, by_medium))
        return self.snapshots[-1]


class Worker:
    """A worker process: what it has been given and not done, and the fence that it heard of last."""

    def __init__(self, worker_id: str, incarnation: str) -> None:
        self.id = worker_id
        self.incarnation = incarnation
        self.fence = 0
        self.has: list[Attempt] = []
        self.free_blocks = BLOCKS
        self._reports = 0

    def report(self, finished: list[Attempt]) -> WorkerReport:
        self.has = [request for request in self.has if request not in finished]
        self._reports += 1
        load: PrefillLoad | DecodeLoad
        if self.id.startswith("p"):
            left = 1000 + self._reports if self.has else 0  # another number each time: it gets on with its work
            load = PrefillLoad(0, len(self.has), left, tuple((*request, 500, 100, 1.25) for request in finished))
        else:
            load = DecodeLoad(0, len(self.has), self.free_blocks, BLOCKS, 0.02, tuple(finished))
        return WorkerReport(self.id, self.incarnation, self.id, WORKERS[self.id], self.fence, load)


class SchedulerMachine(RuleBasedStateMachine):
    """All times are multiples of a quarter of a second, so that no limit is missed by a rounding."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.settings = SchedulerSettings(policy=policy, request_life_s=LIFE_S, seed=1)  # type: ignore[arg-type]
        self.state = SchedulerState(self.settings)
        self.log: list[tuple[float, Event | Routed]] = []
        self.now = 1000.0
        self.born = 0
        self.published: dict[str, Node] = {}
        """By incarnation."""
        self.nodes = {node_id: self.new_node(node_id) for node_id in NODES}
        self.workers = {worker_id: self.new_worker(worker_id) for worker_id in WORKERS}
        self.silent: set[str] = set()
        self.late: list[BlocksChanged | SnapshotArrived] = []
        self.snapshots = "now"
        """What becomes of a question for one."""
        for _ in range(3):
            self.beat(0.5)

    def new_node(self, node_id: str) -> Node:
        self.born += 1
        node = self.published[f"i{self.born}"] = Node(node_id, f"i{self.born}")
        return node

    def new_worker(self, worker_id: str) -> Worker:
        self.born += 1
        return Worker(worker_id, f"i{self.born}")

    # --- what the scheduler is told -------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self.log.append((self.now, event))
        for action in self.state.handle(event, self.now):
            self.do(action, event)

    def do(self, action: Action, cause: Event) -> None:
        match action, cause:
            case Reply(fence), WorkerReport(worker_id, incarnation):
                worker = self.workers[worker_id]
                if worker.incarnation == incarnation and fence > worker.fence and worker_id not in self.silent:
                    worker.fence, worker.has = fence, []
            case FetchSnapshot(node_id, incarnation), _:
                node = self.published[incarnation]
                match self.snapshots:
                    case "now":
                        self.tell(SnapshotArrived(node.snapshot()))
                    case "late":
                        self.late.append(SnapshotArrived(node.snapshot()))
                    case "failed":
                        self.tell(SnapshotFailed(node_id, incarnation))
                    case _:
                        pass
            case _:
                pass

    def beat(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            if node.id not in self.silent:
                self.tell(node.report())
        for worker in self.workers.values():
            if worker.id not in self.silent:
                self.tell(worker.report([]))
        self.tell(Tick())

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0]), times=st.integers(1, 4))
    def time_passes(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.beat(seconds)

    @rule(seconds=st.sampled_from([0.25, 1.25, 4.0]))
    def the_scheduler_stalls(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([2, 4, 6]), who=st.sets(members, min_size=1, max_size=3), for_ever=seldom)
    def some_fall_silent(self, seconds: int, who: set[str], for_ever: bool) -> None:
        before, self.silent = self.silent, self.silent | who
        for _ in range(seconds):
            self.beat(1.0)
        if not for_ever:
            self.silent = before

    @rule()
    def all_speak_again(self) -> None:
        self.silent.clear()
        self.beat(0.5)
        self.beat(0.5)

    @rule(worker_id=workers, share=st.integers(1, 3), lost=seldom)
    def a_worker_has_done_something(self, worker_id: str, share: int, lost: bool) -> None:
        worker = self.workers[worker_id]
        report = worker.report(worker.has[::share])
        if not lost:
            self.tell(report)

    @rule(worker_id=workers)
    def a_worker_loses_what_it_has(self, worker_id: str) -> None:
        self.workers[worker_id].has = []

    @rule(who=members, speaks_once_more=st.booleans(), beats=st.integers(0, 4))
    def a_process_is_replaced(self, who: str, speaks_once_more: bool, beats: int) -> None:
        """The old one may still say a word."""
        old = self.nodes[who] if who in NODES else self.workers[who]
        if isinstance(old, Node):
            self.nodes[who] = self.new_node(who)
        else:
            self.workers[who] = self.new_worker(who)
        for _ in range(beats):
            self.beat(1.0)
        if speaks_once_more:
            self.tell(old.report() if isinstance(old, Node) else old.report(old.has[:1]))

    @rule(node_id=nodes, draining=st.booleans())
    def a_node_is_drained_or_not(self, node_id: str, draining: bool) -> None:
        self.nodes[node_id].draining = draining

    # --- blocks ---------------------------------------------------------------------------------------------------------

    @rule(node_id=nodes, events=st.lists(block_events, min_size=1, max_size=3).map(tuple),
          fate=st.sampled_from(["comes"] * 4 + ["twice", "late", "lost"]))  # fmt: skip
    def blocks_change(self, node_id: str, events: tuple[BlockEvent, ...], fate: str) -> None:
        event = BlocksChanged(self.nodes[node_id].publish(events))
        for _ in range({"comes": 1, "twice": 2}.get(fate, 0)):
            self.tell(event)
        if fate == "late":
            self.late.append(event)

    @precondition(lambda self: self.late)
    @rule(data=st.data(), again=seldom)
    def what_was_late_comes(self, data: st.DataObject, again: bool) -> None:
        at = data.draw(st.integers(0, len(self.late) - 1))
        self.tell(self.late[at] if again else self.late.pop(at))

    @rule(data=st.data(), node_id=nodes)
    def what_a_node_said_comes_again(self, data: st.DataObject, node_id: str) -> None:
        node = self.nodes[node_id]
        said = [*map(BlocksChanged, node.batches), *map(SnapshotArrived, node.snapshots)]
        if said:
            self.tell(data.draw(st.sampled_from(said)))

    @rule(how=st.sampled_from(["now", "now", "late", "failed", "never"]))
    def snapshots_are_answered(self, how: str) -> None:
        self.snapshots = how

    # --- requests -------------------------------------------------------------------------------------------------------

    @rule(wanted=st.lists(prompts, min_size=1, max_size=4), attempt=st.integers(0, 2), avoid=st.sets(workers, max_size=2))
    def requests_come(self, wanted: list[Prompt], attempt: int, avoid: set[str]) -> None:
        for number, doc, blocks, tail, new in wanted:
            self.route(number, attempt, doc, blocks, tail, new, tuple(sorted(avoid)))

    @rule(doc=st.sampled_from(sorted(DOCS)), blocks=st.integers(0, 6), new=answers)
    def a_burst_of_siblings_comes(self, doc: str, blocks: int, new: int) -> None:
        open_now = self.books().open
        for number in range(REQUESTS):
            request = open_now.get(f"r{number}")
            self.route(number, 0 if request is None else request.attempt + 1, doc, blocks, number, new, ())

    def route(
        self, number: int, attempt: int, doc: str, blocks: int, tail: int, new: int, avoid: tuple[str, ...]
    ) -> None:  # fmt: skip
        tokens = max(1, blocks * BLOCK_TOKENS + tail)
        request = RouteRequest(f"r{number}", attempt, DOCS[doc][:blocks], tokens, new, avoid=avoid)
        before = self.books()
        answer = self.state.route(request, self.now)
        self.log.append((self.now, Routed(request, answer)))
        open_before = before.open.get(request.request_id)
        prefill, decode = (before.may_work(prefills=role, avoid=avoid, now=self.now) for role in (True, False))
        if open_before is not None and open_before.attempt > attempt:
            assert not isinstance(answer, Plan)
            assert answer.reason == "overloaded"
        elif isinstance(answer, Plan):
            assert answer.prefill_worker in prefill
            assert answer.decode_worker in decode
            self.check_prefix(answer, request, before)
            for worker_id in {answer.prefill_worker, *([answer.decode_worker] if new > 1 else [])}:
                self.workers[worker_id].has.append((request.request_id, attempt))
        else:
            assert answer.reason == "no_worker"
            assert not prefill or not decode

    def check_prefix(self, plan: Plan, request: RouteRequest, before: Books) -> None:
        """A prefix is planned with that somebody is believed to have, or was told to compute."""
        assert 0 <= plan.cached_blocks <= len(request.keys)
        assert plan.cached_blocks * BLOCK_TOKENS < request.tokens
        here = WORKERS[plan.prefill_worker]
        source = here if plan.prefill_source is None else plan.prefill_source.node_id
        assert before.usable_node(source, self.now)
        known = {key for _, key in self.believed(before, source)}
        if plan.prefill_source is None:
            known |= before.planned_keys.get((here, before.nodes[here].incarnation), set())
        assert set(request.keys[: plan.cached_blocks]) <= known

    @rule(number=st.integers(0, REQUESTS - 1), attempt=st.integers(0, 2))
    def the_gateway_says_that_it_ended(self, number: int, attempt: int) -> None:
        self.tell(RequestEnded(f"r{number}", attempt, 0.5, 10))

    @rule(worker_id=st.sampled_from([*WORKERS, "nobody"]), number=st.integers(0, 99))
    def the_gateway_says_that_a_worker_failed(self, worker_id: str, number: int) -> None:
        self.tell(WorkerFailed(worker_id, f"r{number}"))

    # --- what must hold -------------------------------------------------------------------------------------------------

    def books(self) -> Books:
        return recount(self.log, self.settings)

    def believed(self, books: Books, node_id: str) -> Copies:
        node = books.nodes[node_id]
        return set() if node.dead else content_after(self.published[node.incarnation].batches, node.known_until())

    @invariant()
    def the_books_agree(self) -> None:
        books = self.books()
        assert len(self.state.assignments) == len(books.open)
        for attempt in books.attempts():
            found, expected = self.state.assignments.find(attempt), books.open[attempt[0]]
            assert found is not None
            assert (_id(found.prefill), _id(found.decode)) == (expected.prefill, expected.decode)
        assert {
            worker["id"]: (worker["in_flight"], worker["standing"], worker["fence"], worker["role"] == "prefill")
            for worker in self.state.view(self.now)["workers"]
        } == {
            worker_id: (books.open_at(worker_id), books.standing(worker_id, self.now), worker.fence, worker.prefills)
            for worker_id, worker in books.workers.items()
        }

        believed = {(node_id, *copy) for node_id in books.nodes for copy in self.believed(books, node_id)}
        assert self.indexed() == believed
        assert self.state.index.entries == len(believed)

    def indexed(self) -> set[tuple[str, str, BlockKey]]:
        return {(node_id, medium, key) for key in KEYS for node_id, medium in self.state.index.holders(key)}

    def teardown(self) -> None:
        """Peace: all speak, nobody has anything to do, and what was lost or late stays away. Nothing may be left."""
        if sys.exc_info()[0] is not None:
            return  # a step has failed: what comes of it says nothing
        self.silent.clear()
        self.late.clear()
        self.snapshots = "now"
        for node in self.nodes.values():
            node.draining = False
        for worker in self.workers.values():
            worker.has = []
        for _ in range(PEACE_BEATS):
            self.beat(1.0)
        for worker in self.workers.values():
            worker.free_blocks = 0  # so that its room is what the scheduler's own charges leave
        self.beat(1.0)
        self.the_books_agree()
        view = self.state.view(self.now)
        assert (view["in_flight"], view["promised"]) == (0, 0)
        for worker in view["workers"]:
            assert (worker["in_flight"], worker["standing"]) == (0, "live")
            assert worker.get("queue_s", 0.0) == 0.0
            assert worker.get("room_blocks", BLOCKS) == BLOCKS
        assert self.indexed() == {(node.id, *copy) for node in self.nodes.values() for copy in node.content()}


def _id(worker: Member | None) -> str | None:
    return None if worker is None else worker.id


@pytest.mark.parametrize("policy", POLICIES)
def test_the_scheduler_keeps_the_books_of_its_twin(policy: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: SchedulerMachine(policy),  # type: ignore[arg-type]
        settings=settings(max_examples=20, stateful_step_count=40, deadline=None),
    )
