"""The node's decisions against a dumb twin, and the stories that matter told one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_pool.events.types import BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Action,
    Commit,
    Goodbye,
    Hello,
    Keepalive,
    Miss,
    Peer,
    Publish,
    Release,
    Reserve,
    Send,
    SendBlock,
    StartFetch,
)
from kv_pool.node.slots import InvalidSlotTransition, Slots
from kv_pool.node.state import NodeState
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.settings import PoolSettings
from tests.kv_pool.pool_world import key

LIMITS = PoolSettings(client_dead_s=5.0, handoff_ttl_s=20.0, fetch_inflight_blocks=2)
PEER = Peer("node-b", "tcp://127.0.0.1:1")


def make_state(slots: int = 4) -> NodeState:
    return NodeState(slots=slots, block_tokens=16, settings=LIMITS, policy=LeastRecentlyUsed())


class Scene:
    """A state with clients that keep their tickets apart."""

    def __init__(self, slots: int = 4) -> None:
        self.state = make_state(slots)
        self.now = 0.0
        self.ticket = 0
        self.log: list[Action] = []
        for name in ("w", "r"):
            self.state.handle(name, Hello(100 if name == "w" else 200, 1), self.now)

    def do(self, client: str, request: Any) -> list[Action]:
        actions = self.state.handle(client, request, self.now)
        self.state.check()
        self.log += actions
        return actions

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    def reserve(
        self, keys: list[BlockKey], *, client: str = "w", private: bool = False, timeout_s: float = 1.0
    ) -> list[Any] | None:
        actions = self.do(client, Reserve(self.next_ticket(), tuple(keys), timeout_s, private))
        rows = [a.message["slots"] for a in actions if isinstance(a, Send) and a.message["op"] == "reserved"]
        return rows[0] if rows else None

    def commit(self, slot: int, k: BlockKey, parent: BlockKey | None = None, *, client: str = "w") -> list[Action]:
        return self.do(client, Commit(slot, k, parent, 16, 10, 7, b""))

    def put(self, keys: list[BlockKey], *, private: bool = False) -> list[Action]:
        actions: list[Action] = []
        parent = None
        for k in keys:
            rows = self.reserve([k], private=private)
            assert rows is not None
            if rows[0] is not None:
                actions += self.commit(rows[0][0], k, parent)
            parent = k
        return actions

    def acquire(
        self, keys: list[BlockKey], *, wait: bool = False, source: Peer | None = None, timeout_s: float = 5.0
    ) -> list[Action]:
        return self.do("r", Acquire(self.next_ticket(), tuple(keys), wait, timeout_s, source))


def sent(actions: list[Action], op: str) -> list[dict[str, Any]]:
    return [a.message for a in actions if isinstance(a, Send | SendBlock) and a.message["op"] == op]


def removed(actions: list[Action]) -> list[BlockKey]:
    return [k for a in actions if isinstance(a, Publish) and isinstance(a.event, BlockRemoved) for k in a.event.keys]


def stored(actions: list[Action]) -> list[BlockKey]:
    return [k for a in actions if isinstance(a, Publish) and isinstance(a.event, BlockStored) for k in a.event.keys]


def test_nothing_is_visible_before_its_commit():
    scene = Scene()
    ((slot, _),) = scene.reserve([key(1)])
    assert sent(scene.acquire([key(1)]), "ended") == [{"op": "ended", "ticket": 2, "available": 0, "miss": "not_found"}]
    assert stored(scene.commit(slot, key(1))) == [key(1)]
    assert len(sent(scene.acquire([key(1)]), "granted")) == 1


def test_a_waiting_acquire_is_granted_block_by_block_as_they_are_committed():
    scene = Scene()
    assert scene.acquire([key(1), key(2)], wait=True) == []
    rows = scene.reserve([key(1), key(2)])
    assert [m["position"] for m in sent(scene.commit(rows[0][0], key(1)), "granted")] == [0]
    actions = scene.commit(rows[1][0], key(2), key(1))
    assert [m["position"] for m in sent(actions, "granted")] == [1]
    assert sent(actions, "ended")[0]["miss"] is None


def test_a_waiting_acquire_ends_late_and_leaves_nothing_parked():
    scene = Scene()
    scene.acquire([key(1)], wait=True, timeout_s=3.0)
    assert scene.state.tick(2.9) == []
    assert sent(scene.state.tick(3.0), "ended")[0]["miss"] == "late"
    assert not scene.state.tickets
    scene.state.check()


def test_eviction_takes_the_least_recently_used_leaf_never_a_parent_with_children():
    scene = Scene(slots=4)
    scene.put([key(1), key(2), key(3)])
    scene.now = 1.0
    scene.put([key(9)])
    scene.now = 2.0
    scene.put([key(10)])
    assert removed(scene.log) == [key(3)]
    gone = [k for k in (key(1), key(2), key(3), key(9)) if scene.state.blocks.get(k) is None]
    assert gone == [key(3)]


def test_leased_blocks_are_never_evicted_and_a_writer_waits_for_room():
    scene = Scene(slots=4)
    scene.put([key(i) for i in range(4)])
    leases = [m["lease"] for m in sent(scene.acquire([key(i) for i in range(4)]), "granted")]
    assert scene.reserve([key(20)], timeout_s=2.0) is None
    actions = scene.do("r", Release(leases[3], False))
    assert actions == [] or sent(actions, "reserved") == []
    granted = sent(scene.state.tick(0.5), "reserved")
    assert len(granted) == 1
    assert scene.state.blocks.get(key(3)) is None


def test_a_writer_that_waits_too_long_is_refused():
    scene = Scene(slots=4)
    scene.put([key(i) for i in range(4)])
    scene.acquire([key(i) for i in range(4)])
    assert scene.reserve([key(20)], timeout_s=2.0) is None
    assert "deadline" in sent(scene.state.tick(2.0), "refused")[0]["reason"]


def test_more_than_the_pool_holds_is_refused_at_once():
    scene = Scene(slots=4)
    actions = scene.do("w", Reserve(1, tuple(key(i) for i in range(5)), 9.0, False))
    assert "do not fit" in sent(actions, "refused")[0]["reason"]


def test_a_second_writer_of_the_same_block_has_nothing_to_do():
    scene = Scene()
    first = scene.reserve([key(1)])
    assert scene.reserve([key(1)], client="r") == [None]
    scene.commit(first[0][0], key(1))
    assert scene.reserve([key(1)], client="r") == [None]


def test_a_commit_of_somebody_elses_slot_is_refused():
    scene = Scene()
    ((slot, _),) = scene.reserve([key(1)])
    assert sent(scene.commit(slot, key(1), client="r"), "error")[0]["code"] == "not_reserved"
    assert sent(scene.commit(slot, key(2)), "error")[0]["code"] == "not_reserved"
    assert scene.state.blocks.get(key(1)) is None


def test_a_private_block_is_unknown_to_others_read_once_and_gone():
    scene = Scene()
    assert stored(scene.put([key(1)], private=True)) == []
    assert scene.state.blocks.keys() == []
    (granted,) = sent(scene.acquire([key(1)]), "granted")
    scene.do("r", Release(granted["lease"], True))
    assert scene.state.blocks.get(key(1)) is None
    assert scene.state.slots.free == 4


def test_a_private_block_that_nobody_fetches_expires_but_not_under_its_reader():
    scene = Scene()
    scene.put([key(1), key(2)], private=True)
    (granted,) = sent(scene.acquire([key(1)]), "granted")
    scene.now = LIMITS.handoff_ttl_s
    scene.do("w", Keepalive())
    scene.do("r", Keepalive())
    scene.state.tick(scene.now)
    assert scene.state.blocks.get(key(2)) is None
    assert scene.state.slots.free == 3
    scene.do("r", Release(granted["lease"], False))
    assert scene.state.slots.free == 4


def test_a_dead_client_gives_back_leases_at_once_and_slots_when_it_is_surely_dead():
    scene = Scene()
    scene.put([key(1)])
    scene.acquire([key(1)])
    scene.reserve([key(2)])
    scene.now = 5.1
    scene.state.tick(scene.now)
    scene.state.check()
    assert not scene.state.leases
    assert len(scene.state.quarantined) == 1
    assert scene.state.slots.free == 2
    scene.state.process_gone(100, 1, scene.now)
    assert scene.state.slots.free == 3
    scene.state.check()


def test_a_frozen_writer_that_wakes_is_told_and_its_slot_is_free():
    scene = Scene()
    ((slot, _),) = scene.reserve([key(2)])
    scene.now = 5.1
    scene.state.tick(scene.now)
    assert sent(scene.commit(slot, key(2)), "error")[0]["code"] == "unknown_client"
    assert scene.state.blocks.get(key(2)) is None
    assert scene.state.slots.free == 4


def test_goodbye_gives_everything_back():
    scene = Scene()
    scene.put([key(1)])
    scene.reserve([key(2)])
    scene.acquire([key(1), key(3)], wait=True)
    scene.do("w", Goodbye())
    scene.do("r", Goodbye())
    assert (len(scene.state.leases), len(scene.state.tickets), scene.state.slots.free) == (0, 0, 3)


def test_a_slots_epoch_changes_with_every_owner():
    scene = Scene(slots=4)
    scene.put([key(1)])
    (granted,) = sent(scene.acquire([key(1)]), "granted")
    scene.do("r", Release(granted["lease"], False))
    for i in range(10, 14):
        scene.put([key(i)])
    assert scene.state.slots.epoch(granted["slot"]) > granted["epoch"]


def test_two_acquires_of_one_remote_block_cause_one_fetch():
    scene = Scene()
    first = scene.acquire([key(1)], source=PEER)
    (fetch,) = [a for a in first if isinstance(a, StartFetch)]
    assert scene.acquire([key(1)], source=PEER) == []
    slot, _ = scene.state.fetched(fetch.fetch, key(1), 0.0)
    actions = scene.state.fill(slot, Commit(-1, key(1), None, 16, 10, 7, b""), private=False, sound=True, now=0.0)
    assert [m["remote"] for m in sent(actions, "granted")] == [True, True]
    assert len(sent(actions, "ended")) == 2
    scene.state.check()


def test_the_window_bounds_what_one_fetch_asks_for_and_the_next_follows():
    scene = Scene()
    (fetch,) = [a for a in scene.acquire([key(i) for i in range(4)], source=PEER) if isinstance(a, StartFetch)]
    assert fetch.keys == (key(0), key(1))
    actions: list[Action] = []
    for i in (0, 1):
        slot, _ = scene.state.fetched(fetch.fetch, key(i), 0.0)
        actions += scene.state.fill(slot, Commit(-1, key(i), None, 16, 10, 7, b""), private=False, sound=True, now=0.0)
    actions += scene.state.fetch_ended(fetch.fetch, None, 0.0)
    (following,) = [a for a in actions if isinstance(a, StartFetch)]
    assert following.keys == (key(2), key(3))
    scene.state.check()


@pytest.mark.parametrize("miss", [Miss.NOT_FOUND, Miss.LOST, Miss.LATE])
def test_a_failed_fetch_ends_its_waiters_with_its_reason(miss: Miss):
    scene = Scene()
    (fetch,) = [a for a in scene.acquire([key(1)], source=PEER) if isinstance(a, StartFetch)]
    assert sent(scene.state.fetch_ended(fetch.fetch, miss, 0.0), "ended")[0]["miss"] == miss.value
    scene.state.check()


def test_a_corrupt_fetched_block_is_not_stored_and_its_slot_is_free():
    scene = Scene()
    (fetch,) = [a for a in scene.acquire([key(1)], source=PEER) if isinstance(a, StartFetch)]
    slot, _ = scene.state.fetched(fetch.fetch, key(1), 0.0)
    scene.state.fill(slot, Commit(-1, key(1), None, 16, 10, 7, b""), private=False, sound=False, now=0.0)
    assert scene.state.slots.free == 4
    assert sent(scene.state.fetch_ended(fetch.fetch, None, 0.0), "ended")[0]["available"] == 0


def test_a_fetch_that_nobody_waits_for_any_more_is_called_off():
    scene = Scene()
    (fetch,) = [a for a in scene.acquire([key(1)], source=PEER, timeout_s=1.0) if isinstance(a, StartFetch)]
    actions = scene.state.tick(1.0)
    assert [type(a).__name__ for a in actions] == ["CancelFetch", "Send"]
    assert scene.state.fetched(fetch.fetch, key(1), 1.0)[0] is None
    assert len(scene.state.fetches) == 0


def test_an_illegal_slot_move_is_an_error_and_changes_nothing():
    slots = Slots(2)
    slot = slots.take()
    with pytest.raises(InvalidSlotTransition, match="RESERVED -> RESERVED"):
        slots._move(slot, slots.state(slot))
    slots.commit(slot)
    with pytest.raises(InvalidSlotTransition):
        slots.quarantine(slot)
    assert sum(slots.counts().values()) == 2


class NodeMachine(RuleBasedStateMachine):
    """Random clients against a twin that knows only what is committed. Checks: what is granted was committed and never evicted
    under a
    lease; parents outlive their children; nothing leaks once all clients are gone."""

    @initialize(slots=st.integers(4, 8))
    def begin(self, slots: int) -> None:
        self.state = make_state(slots)
        self.now = 0.0
        self.clients = ["w0", "w1", "r0"]
        self.reserved: dict[int, tuple[str, BlockKey, BlockKey | None]] = {}
        self.visible: set[BlockKey] = set()
        self.leased: dict[int, BlockKey] = {}
        self.lease_client: dict[int, str] = {}
        self.ticket = 0
        self.parents: dict[BlockKey, BlockKey | None] = {}
        self.asked: dict[int, tuple[BlockKey, ...]] = {}
        for i, name in enumerate(self.clients):
            self.run(self.state.handle(name, Hello(1000 + i, 1), self.now))

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Publish(BlockStored(keys=keys)):
                    self.visible |= set(keys)
                case Publish(BlockRemoved(keys=keys)):
                    for k in keys:
                        assert k in self.visible
                        assert k not in self.leased.values(), "evicted under a lease"
                        assert not [c for c, p in self.parents.items() if p == k and c in self.visible], (
                            "a parent went before its child"
                        )
                        self.visible.discard(k)
                case Send(client, {"op": "granted"} as message):
                    assert message["key"] in self.visible
                    self.leased[message["lease"]] = message["key"]
                    self.lease_client[message["lease"]] = client
                case Send(client, {"op": "reserved"} as message):
                    keys = self.asked[message["ticket"]]
                    for k, row in zip(keys, message["slots"], strict=True):
                        if row is not None:
                            assert row[0] not in self.reserved
                            self.reserved[row[0]] = (client, k, self.parents[k])
                case _:
                    pass

    @rule(chain=st.integers(0, 3), start=st.integers(0, 3), length=st.integers(1, 3), who=st.sampled_from(["w0", "w1"]))
    def write(self, chain: int, start: int, length: int, who: str) -> None:
        keys = tuple(key(chain * 100 + start + i) for i in range(length))
        for i, k in enumerate(keys):
            depth = start + i
            self.parents[k] = key(chain * 100 + depth - 1) if depth else None
        self.ticket += 1
        self.asked[self.ticket] = keys
        self.run(self.state.handle(who, Reserve(self.ticket, keys, 2.0, False), self.now))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), abandon=st.booleans())
    def finish_write(self, data: st.DataObject, abandon: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        client, k, parent = self.reserved.pop(slot)
        request = Abandon(slot) if abandon else Commit(slot, k, parent, 16, 10, 7, b"")
        self.run(self.state.handle(client, request, self.now))

    @rule(chain=st.integers(0, 3), length=st.integers(1, 4), wait=st.booleans(), who=st.sampled_from(["r0", "w0"]))
    def read(self, chain: int, length: int, wait: bool, who: str) -> None:
        self.ticket += 1
        keys = tuple(key(chain * 100 + i) for i in range(length))
        self.run(self.state.handle(who, Acquire(self.ticket, keys, wait, 1.5), self.now))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leased)))
        del self.leased[lease]
        self.run(self.state.handle(self.lease_client.pop(lease), Release(lease, False), self.now))

    @rule(step=st.sampled_from([0.1, 1.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        for name in self.clients:
            self.run(self.state.handle(name, Keepalive(), self.now))
        self.run(self.state.tick(self.now))

    @rule(who=st.sampled_from(["w0", "w1", "r0"]), surely_dead=st.booleans())
    def client_dies(self, who: str, surely_dead: bool) -> None:
        self.leased = {n: k for n, k in self.leased.items() if self.lease_client[n] != who}
        self.reserved = {s: r for s, r in self.reserved.items() if r[0] != who}
        self.run(self.state.client_gone(who))
        if surely_dead:
            self.run(self.state.process_gone(1000 + self.clients.index(who), 1, self.now))
        self.run(self.state.handle(who, Keepalive(), self.now))  # it speaks: told that it is unknown, its slots are free
        self.run(self.state.handle(who, Hello(1000 + self.clients.index(who), 1), self.now))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "state"):
            self.state.check()
            assert set(self.state.blocks.keys()) == self.visible
            assert set(self.state.reservations) == set(self.reserved)

    def teardown(self) -> None:
        if hasattr(self, "state"):
            for name in self.clients:
                self.leased = {n: k for n, k in self.leased.items() if self.lease_client[n] != name}
                self.reserved = {s: r for s, r in self.reserved.items() if r[0] != name}
                self.run(self.state.handle(name, Goodbye(), self.now))
            assert not self.state.leases
            assert not self.state.tickets
            assert self.state.slots.free == self.state.slots.count - len(self.visible)


NodeMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestNodeMachine = NodeMachine.TestCase
