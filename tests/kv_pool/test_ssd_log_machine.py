"""The SSD log against a dumb twin: any order of writes, answers, failures, expiries, cascades and restarts."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_pool.keys import BlockKey
from kv_pool.policy.segments import ExpiredThenDeadThenOldest
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.log import Missing, SsdLog
from kv_pool.ssd.plan import Candidate, Refusal
from kv_pool.ssd.records import PAGE, Place, WriteBatch, batch_bytes
from tests.kv_pool.ssd_twin import Medium, Twin, key_of

SEGMENTS = 5
SEGMENT_PAGES = 12
TTL = [100.0, 40.0]
BATCHES_MAX = 4
BUDGET = 300 * PAGE
KEYS = 30


seldom = st.sampled_from([False] * 7 + [True])


def path_of(number: int) -> list[int]:
    """Of a tree with three branches everywhere: from the root down to ``number``."""
    path: list[int] = []
    while number > 0:
        path.append(number)
        number = (number - 1) // 3
    return path[::-1]


class SsdLogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.medium = Medium()
        self.twin = Twin(TTL)
        self.budget = WriteBudget(BUDGET)
        self.log = self.new_log()
        self.up = False
        self.readers: list[Place] = []
        self.generations: dict[int, int] = {}
        self.slots = 0
        self.whole = True
        """Nothing has failed yet, so a restart must find everything."""
        self.come_up()

    def new_log(self) -> SsdLog:
        return SsdLog(
            segments=SEGMENTS,
            segment_pages=SEGMENT_PAGES,
            ttl_s=TTL,
            budget=self.budget,
            batches_in_flight_max=BATCHES_MAX,
            batch_bytes_max=4 * PAGE,
            policy=ExpiredThenDeadThenOldest(),
        )

    # --- writing ----------------------------------------------------------------------------------------------------------------

    @rule(
        leaf=st.integers(1, KEYS),
        skip=st.integers(0, 2),
        retention=st.sampled_from([0, 0, 1]),
        length=st.sampled_from([0, 100, PAGE, PAGE + 1]),
    )
    def write(self, leaf: int, skip: int, retention: int, length: int) -> None:
        path = path_of(leaf)
        chain: list[Candidate] = []
        for number in path[min(skip, len(path) - 1) :]:
            self.slots += 1
            parent = key_of((number - 1) // 3) if number > 3 else None
            chain.append(Candidate(key_of(number), parent, self.slots, 16, length, number, retention, b"m"))
        wanted = self.twin.wanted(chain, self.now)
        ancestors = self.ancestors(chain)
        refusal = self.log.refusal(chain, self.now)
        before = self.log.stats(self.now)
        batches, dropped = self.log.write(chain, self.now)
        if refusal is not None:
            assert (refusal is Refusal.DOWN) == (not self.up)
            assert refusal is not Refusal.BAD_CHAIN
            assert (batches, dropped) == ([], [])
            assert self.log.stats(self.now) == before
            return
        assert self.up
        self.check_whole_segments(set(dropped))
        assert not ancestors & set(dropped) or not wanted, "a chain is not eaten from its own end"
        self.twin.drop_all(set(dropped))
        self.twin.write(wanted, self.now)
        self.send(batches)
        assert {w.key for w in self.twin.underway()} >= {c.key for c in wanted}

    def ancestors(self, chain: list[Candidate]) -> set[BlockKey]:
        """What is here of the chain, and of what it follows without a gap."""
        found = {candidate.key for candidate in chain if self.twin.here(candidate.key)}
        above = chain[0].parent
        while above is not None and self.twin.here(above):
            found.add(above)
            number = (int.from_bytes(above, "big") - 1) // 3
            above = key_of(number) if number else None
        return found

    @precondition(lambda self: self.up)
    @rule(leaves=st.lists(st.integers(1, KEYS), min_size=1, max_size=4), length=st.sampled_from([100, PAGE + 1]))
    def write_through(self, leaves: list[int], length: int) -> None:
        """Some chains, and all of their batches answered."""
        for leaf in leaves:
            self.write(leaf, 0, 0, length)
            self.flush()
            while any(flight.answer is None for flight in self.twin.flights):
                self.answer(0, False, 0)

    @rule()
    def flush(self) -> None:
        unsent = len(self.twin.unsent)
        batches = self.log.flush(self.now)
        self.send(batches)
        assert len(self.twin.flights) <= BATCHES_MAX
        assert batches or not unsent or len(self.twin.flights) == BATCHES_MAX

    def send(self, batches: list[WriteBatch]) -> None:
        for batch in batches:
            assert not any(flight.void and flight.batch.segment == batch.segment for flight in self.twin.flights)
            if batch.opens:
                assert batch.generation > self.generations.get(batch.segment, 0)
                assert not [k for k, r in self.twin.stored.items() if r.place[0] == batch.segment]
                assert not [place for place in self.readers if place.segment == batch.segment]
                self.generations[batch.segment] = batch.generation
            assert batch.generation == self.generations[batch.segment]
            assert batch.opens or batch.records or batch.footer
            self.twin.sent(batch)
            self.medium.sent(batch)

    @precondition(lambda self: any(flight.answer is None for flight in self.twin.flights))
    @rule(which=st.integers(0, BATCHES_MAX), fails=st.sampled_from([False] * 6 + [True]), part=st.integers(0, 3))
    def answer(self, which: int, fails: bool, part: int) -> None:
        open_flights = [flight for flight in self.twin.flights if flight.answer is None]
        flight = open_flights[which % len(open_flights)]
        flight.answer = not (fails or flight.void)
        batch, written = flight.batch, batch_bytes(flight.batch)
        if not flight.void:
            if flight.answer:
                self.medium.apply(batch, len(batch.records))
            else:
                self.whole = False
                self.medium.apply(batch, min(part, len(batch.records)), header=part > 0, whole=False)
                written //= part + 1
        result = self.log.written(batch.id, flight.answer, written, self.now)
        stored, failed, dropped = self.twin.settle()
        more = list(result.failed)
        for key in failed:
            more.remove(key)
        dropped |= self.twin.fail_unsent(more)
        assert {key for key, _, _ in result.stored} == stored
        assert set(result.dropped) == dropped

    # --- looking ----------------------------------------------------------------------------------------------------------------

    @rule(number=st.integers(1, KEYS), seconds=st.sampled_from([0.0, 15.0]))
    def read(self, number: int, seconds: float) -> None:
        if self.log.holds(key_of(number)):
            self.log.touch(key_of(number), self.now)
            self.readers.append(self.log.begin_read(key_of(number)))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9))
    def end_read(self, which: int) -> None:
        self.log.end_read(self.readers.pop(which % len(self.readers)))

    # --- leaving ----------------------------------------------------------------------------------------------------------------

    @rule(number=st.integers(1, 3 * KEYS))
    def drop(self, number: int) -> None:
        key = key_of(number)
        expected = self.twin.drop(key) if key in self.twin.stored else set[BlockKey]()
        assert set(self.log.drop(key)) == expected

    @rule(seconds=st.sampled_from([0.5, 11.0, 30.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        expected = self.twin.closure(self.twin.expire(self.now))
        gone = self.log.expire(self.now)
        assert len(gone) == len(set(gone))
        assert set(gone) <= expected
        if not self.twin.unsent and not self.twin.broken:
            assert set(gone) == expected
        self.check_whole_segments(set(gone))
        self.twin.drop_all(set(gone))

    def check_whole_segments(self, gone: set[BlockKey]) -> None:
        """``gone`` is what lies in some segments, and what follows."""
        lying: dict[int, set[BlockKey]] = {}
        for key, record in self.twin.stored.items():
            lying.setdefault(record.place[0], set()).add(key)
        dead = {key for keys in lying.values() if keys <= gone for key in keys}
        assert self.twin.closure(dead) == gone

    # --- the disk ---------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.up)
    @rule(seldom=seldom, parts=st.lists(st.integers(0, 3), min_size=BATCHES_MAX, max_size=BATCHES_MAX))
    def go_down(self, seldom: bool, parts: list[int]) -> None:
        if not seldom:
            return
        self.interrupt(parts)
        lost = self.log.down(self.now)
        assert set(lost.dropped) == set(self.twin.stored)
        assert sorted(lost.failed) == sorted(w.key for w in self.twin.unsent)
        self.twin.unsent.clear()
        self.twin.stored.clear()
        self.twin.broken.clear()
        for flight in self.twin.flights:
            flight.void = True
        self.up = False

    @precondition(lambda self: not self.up)
    @rule()
    def come_up(self) -> None:
        found = self.medium.recovered()
        for segment in found:
            # A zombie's segment must not be written, and a number that never reached the medium is not used twice.
            self.generations[segment.id] = max(self.generations.get(segment.id, 0), segment.generation)
        self.check_recovery(self.log.recover(found, self.now), found)
        for segment in found:
            if not segment.sealed and self.log.stats(self.now).up:
                self.generations[segment.id] = segment.generation
        self.up = True

    @rule(seldom=seldom, parts=st.lists(st.integers(0, 3), min_size=BATCHES_MAX, max_size=BATCHES_MAX))
    def crash(self, seldom: bool, parts: list[int]) -> None:
        """SIGKILL, and a new process that finds what is on the medium."""
        if not seldom:
            return
        committed = {key: record for key, record in self.twin.stored.items() if self.up}
        if self.up:
            self.interrupt(parts)
        self.budget = WriteBudget.unpack(self.budget.pack(), BUDGET)
        self.log = self.new_log()
        self.twin = Twin(TTL)
        self.readers.clear()
        self.generations = {number: segment.generation for number, segment in self.medium.segments.items()}
        found = self.medium.recovered()
        self.check_recovery(self.log.recover(found, self.now), found)
        if self.whole:
            alive = {key for key, record in committed.items() if self.twin.latest.get(record.place[0], 0.0) > self.now}
            assert {key for key in alive if not self.follows_the_dead(key, alive, committed)} <= set(self.twin.stored)
        self.up = True
        self.whole = True

    def follows_the_dead(self, key: BlockKey, alive: set[BlockKey], committed: dict[BlockKey, object]) -> bool:
        """Whether something that ``key`` follows was left to expire by the restart."""
        record = committed.get(key)
        while record is not None:
            if key not in alive:
                return True
            parent = record.parent  # type: ignore[attr-defined]
            if parent is None:
                return False
            key, record = parent, committed.get(parent)
        return False

    def interrupt(self, parts: list[int]) -> None:
        """What is in flight gets there in part."""
        for flight, part in zip([f for f in self.twin.flights if f.answer is None and not f.void], parts, strict=False):
            self.medium.apply(flight.batch, min(part, len(flight.batch.records)), header=part > 0, whole=part == 3)

    def check_recovery(self, stored: list[tuple[BlockKey, BlockKey | None, int]], found: list) -> None:
        self.twin.recover(found, self.now)
        assert len(stored) == len({key for key, _, _ in stored})
        assert {key for key, _, _ in stored} == set(self.twin.stored)
        seen: set[BlockKey] = set()
        for key, parent, tokens in stored:
            assert tokens == 16
            assert parent is None or parent in seen or (self.twin.stored[key].first and parent not in self.twin.stored)
            seen.add(key)

    # --- always -----------------------------------------------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        self.log.check()
        keys = self.log.keys()
        assert len(keys) == len(self.log) == len(self.twin.stored)
        assert set(keys) == set(self.twin.stored)
        order = {key: position for position, key in enumerate(keys)}
        for key, record in self.twin.stored.items():
            assert record.parent is None or record.first or record.parent in order
            assert record.parent not in order or order[record.parent] < order[key]
            found = self.log.find(key, self.now)
            if record.expires <= self.now:
                assert found is Missing.EXPIRED
            else:
                assert isinstance(found, Place)
                assert (found.segment, found.generation, found.page) == record.place
        for number in range(1, KEYS + 1):
            assert key_of(number) in order or self.log.find(key_of(number), self.now) is Missing.ABSENT
        assert self.budget.spent(self.now) <= BUDGET


TestSsdLogMachine = SsdLogMachine.TestCase
TestSsdLogMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
