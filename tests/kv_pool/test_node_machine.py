"""The node's decisions against a dumb twin, over thousands of random events.

The twin believes only what the node tells the outside: events, grants, slots. It checks that what is granted was committed, that
nothing is evicted under a lease or under its child, that a slot never has two owners, that every acquire and fetch ends once, and
that nothing is left when everybody has gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_pool.events.types import BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Cancel,
    Commit,
    Ended,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Keepalive,
    Miss,
    Peer,
    Pull,
    Refusal,
    Release,
    Request,
    Reserve,
    ReserveDenied,
    SlotsReserved,
    Stalled,
)
from kv_pool.node.slots import SlotState
from kv_pool.node.stimuli import (
    Action,
    Asked,
    BlockArrived,
    BlockLanded,
    CancelFetch,
    ClientGone,
    Event,
    FetchEnded,
    FetchStalled,
    Land,
    ProcessGone,
    Publish,
    Send,
    SendBlock,
    SetEpoch,
    StartFetch,
    Tick,
)
from tests.kv_pool.node_scene import BLOCK_TOKENS, LIMITS, OTHER_PEER, PEER, PIDS, key, make_state

CHAINS, CHAIN_LENGTH = 3, 4
WRITERS = st.sampled_from(["w", "r"])
CLIENTS = st.sampled_from(sorted(PIDS))
SOURCES = st.sampled_from([None, PEER, OTHER_PEER])
DEPTHS = st.integers(1, CHAIN_LENGTH)


def chain(number: int, start: int, stop: int) -> tuple[BlockKey, ...]:
    return tuple(key(number * 100 + i) for i in range(start, stop))


def parent_of(k: BlockKey) -> BlockKey | None:
    number = int.from_bytes(k)
    return key(number - 1) if number % 100 else None


@dataclass
class Twin:
    """What the outside knows."""

    visible: set[BlockKey] = field(default_factory=set)
    leased: dict[int, tuple[str, Grant]] = field(default_factory=dict)
    reserved: dict[int, tuple[str, BlockKey]] = field(default_factory=dict)
    asked: dict[tuple[str, int], Request] = field(default_factory=dict)
    granted: dict[tuple[str, int], int] = field(default_factory=dict)
    fetches: dict[int, StartFetch] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)

    def forget_holdings(self, client: str) -> None:
        self.leased = {n: lease for n, lease in self.leased.items() if lease[0] != client}
        self.reserved = {s: r for s, r in self.reserved.items() if r[0] != client}

    def forget_questions(self, client: str) -> None:
        self.granted = {t: n for t, n in self.granted.items() if t[0] != client}
        self.asked = {t: r for t, r in self.asked.items() if t[0] != client}


class NodeMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(4, 8))
    def begin(self, slots: int) -> None:
        self.state = make_state(slots)
        self.twin = Twin()
        self.now = 0.0
        self.ticket = 0
        for name, pid in PIDS.items():
            self.happens(Asked(name, Hello(pid, 1)))

    # --- the twin follows ---------------------------------------------------------------------------------------------------

    def happens(self, event: Event) -> list[Action]:
        actions = self.state.handle(event, self.now)
        for action in actions:
            self.follow(action)
        return actions

    def follow(self, action: Action) -> None:
        twin = self.twin
        match action:
            case Publish(BlockStored(keys=stored)):
                assert not twin.visible & set(stored)
                twin.visible |= set(stored)
            case Publish(BlockRemoved(keys=gone)):
                for k in gone:
                    assert k not in {grant.key for _, grant in twin.leased.values()}, "evicted under a lease"
                    assert not [c for c in twin.visible if parent_of(c) == k], "a parent went before its child"
                    twin.visible.remove(k)
            case SetEpoch(slot, epoch):
                assert epoch > twin.epochs.get(slot, 0), "an epoch came again"
                twin.epochs[slot] = epoch
            case Send(client, Granted() as granted) | SendBlock(client, Granted() as granted):
                for i, grant in enumerate(granted.grants()):
                    self.follow_grant(client, granted.ticket, granted.position + i, grant)
                if granted.ended:
                    self.follow(Send(client, Ended(granted.ticket, granted.position + granted.count, None)))
            case Send(client, SlotsReserved(ticket, slots)):
                request = twin.asked.pop((client, ticket))
                for k, slot in zip(request.keys, slots, strict=True):
                    if slot is not None:
                        assert slot not in twin.reserved
                        assert slot not in {grant.slot for _, grant in twin.leased.values()}
                        twin.reserved[slot] = (client, k)
            case Send(client, ReserveDenied(ticket)):
                del twin.asked[client, ticket]
            case Send(client, Ended(ticket, available, miss)):
                request = twin.asked.pop((client, ticket))
                assert available == twin.granted.pop((client, ticket), 0)
                assert (miss is None) == (available == len(request.keys))
            case StartFetch():
                under_way = {k for fetch in twin.fetches.values() for k in fetch.keys}
                assert not under_way & set(action.keys), "fetched twice at a time"
                twin.fetches[action.fetch] = action
            case CancelFetch(fetch):
                del twin.fetches[fetch]
            case Send(_, Refusal(code)):
                raise AssertionError(f"nothing that was asked is refused, but {code}")
            case Send(_, Stalled()) | Land() | Send():
                pass
            case _:
                pass

    def follow_grant(self, client: str, ticket: int, position: int, grant: Grant) -> None:
        twin = self.twin
        assert twin.granted.get((client, ticket), 0) == position
        assert twin.asked[client, ticket].keys[position] == grant.key
        assert grant.private or grant.key in twin.visible
        assert grant.slot not in twin.reserved
        assert grant.epoch == twin.epochs[grant.slot]
        twin.granted[client, ticket] = position + 1
        twin.leased[grant.lease] = (client, grant)
        if client == "far":
            assert sum(c == "far" for c, _ in twin.leased.values()) <= LIMITS.fetch_inflight_blocks

    def ask(self, client: str, request: Request) -> None:
        if isinstance(request, Reserve | Acquire | Pull):
            self.twin.asked[client, request.ticket] = request
        self.happens(Asked(client, request))

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    # --- what may happen ----------------------------------------------------------------------------------------------------

    @rule(
        number=st.integers(0, CHAINS - 1), start=st.integers(0, CHAIN_LENGTH - 1), length=DEPTHS, who=WRITERS, names=st.booleans()
    )
    def reserve(self, number: int, start: int, length: int, who: str, names: bool) -> None:
        wanted = chain(number, start, start + length)
        parent = parent_of(wanted[0]) if names else None
        self.ask(who, Reserve(self.next_ticket(), wanted, parent, 2.0, False))

    @rule(number=st.integers(0, 2), who=WRITERS)
    def reserve_a_tail(self, number: int, who: str) -> None:
        self.ask(who, Reserve(self.next_ticket(), (key(9000 + number * 100),), None, 2.0, True))

    @precondition(lambda self: self.twin.reserved)
    @rule(data=st.data(), commits=st.booleans())
    def finish_write(self, data: st.DataObject, commits: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.twin.reserved)))
        client, k = self.twin.reserved.pop(slot)
        commit = Commit(slot, k, parent_of(k), BLOCK_TOKENS, 10, 7, b"")
        self.ask(client, commit if commits else Abandon(slot))

    @rule(number=st.integers(0, CHAINS - 1), length=DEPTHS, wait=st.booleans(), who=WRITERS, source=SOURCES)
    def acquire(self, number: int, length: int, wait: bool, who: str, source: Peer | None) -> None:
        self.ask(who, Acquire(self.next_ticket(), chain(number, 0, length), wait, 1.5, () if source is None else (source,)))

    @rule(number=st.integers(0, 2), who=WRITERS)
    def acquire_a_tail(self, number: int, who: str) -> None:
        self.ask(who, Acquire(self.next_ticket(), (key(9000 + number * 100),), True, 1.5, ()))

    @rule(number=st.integers(0, CHAINS - 1), length=DEPTHS, wait=st.booleans())
    def pull(self, number: int, length: int, wait: bool) -> None:
        self.ask("far", Pull(self.next_ticket(), chain(number, 0, length), wait, 1.5, 2))

    @precondition(lambda self: self.twin.leased)
    @rule(data=st.data(), consume=st.booleans())
    def release(self, data: st.DataObject, consume: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.twin.leased)))
        client, _ = self.twin.leased.pop(lease)
        self.ask(client, Release((lease,), consume))

    @precondition(lambda self: self.twin.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        acquires = sorted(t for t, r in self.twin.asked.items() if not isinstance(r, Reserve))
        if acquires:
            client, ticket = data.draw(st.sampled_from(acquires))
            del self.twin.asked[client, ticket]
            self.twin.granted.pop((client, ticket), None)
            self.ask(client, Cancel(ticket))

    @precondition(lambda self: self.twin.fetches)
    @rule(data=st.data(), sound=st.booleans(), private=st.booleans())
    def block_arrives(self, data: st.DataObject, sound: bool, private: bool) -> None:
        fetch = self.twin.fetches[data.draw(st.sampled_from(sorted(self.twin.fetches)))]
        k = data.draw(st.sampled_from(fetch.keys))
        commit = Commit(-1, k, parent_of(k), BLOCK_TOKENS, 10, 7, b"")
        for land in [a for a in self.happens(BlockArrived(fetch.fetch, commit, private)) if isinstance(a, Land)]:
            self.happens(BlockLanded(land.slot, sound))

    @precondition(lambda self: self.twin.fetches)
    @rule(data=st.data(), miss=st.sampled_from([None, *Miss, "stalled"]))
    def fetch_ends_or_stalls(self, data: st.DataObject, miss: Miss | str | None) -> None:
        fetch = data.draw(st.sampled_from(sorted(self.twin.fetches)))
        if miss == "stalled":
            self.happens(FetchStalled(fetch))
        else:
            del self.twin.fetches[fetch]
            self.happens(FetchEnded(fetch, miss))

    @rule(step=st.sampled_from([0.1, 1.0, 4.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        for name in PIDS:
            self.ask(name, Keepalive())
        self.happens(Tick())
        assert self.state.next_deadline() is None or self.state.next_deadline() > self.now

    @rule(who=CLIENTS, how=st.sampled_from(["goodbye", "gone", "killed", "silent"]))
    def client_goes_and_another_comes(self, who: str, how: str) -> None:
        self.twin.forget_holdings(who)
        if how != "silent":
            self.twin.forget_questions(who)
        match how:
            case "goodbye":
                self.ask(who, Goodbye())
            case "killed" if PIDS[who]:
                self.happens(ProcessGone(PIDS[who], 1))
            case "silent":
                self.now += LIMITS.client_dead_s + 0.1
                for name in PIDS:
                    if name != who:
                        self.ask(name, Keepalive())
                self.happens(Tick())  # which first ends what the silent one waits for
                self.twin.forget_questions(who)
            case _:
                self.happens(ClientGone(who))
        self.happens(Asked(who, Hello(PIDS[who], 1)))  # it speaks: whatever was quarantined is free

    # --- what must always hold ----------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "state"):
            state, twin = self.state, self.twin
            state.check()
            assert set(state.blocks.public_keys()) == twin.visible
            assert {s for s, r in state.writers.reservations.items() if r.client} == set(twin.reserved)
            assert {n for c in state.clients.values() for n in c.leases} == set(twin.leased)
            assert state.readers.leases == len(twin.leased)
            assert set(state.readers.tickets) == {t for t, r in twin.asked.items() if not isinstance(r, Reserve)}
            assert len(state.readers.fetches) == len(twin.fetches)

    def teardown(self) -> None:
        """Everybody goes: all slots are free or hold a block that may be evicted."""
        if hasattr(self, "state"):
            for name in PIDS:
                self.twin.forget_holdings(name)
                self.twin.forget_questions(name)
                self.happens(Asked(name, Goodbye()))
            self.now += LIMITS.handoff_ttl_s + 1
            self.happens(Tick())
            self.holds()
            counts = self.state.slots.counts()
            assert counts[SlotState.RESERVED] == counts[SlotState.QUARANTINED] == 0
            assert counts[SlotState.COMMITTED] == self.state.blocks.idle == len(self.twin.visible)
            assert not self.twin.fetches


NodeMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestNodeMachine = NodeMachine.TestCase
