"""A node state driven by hand: clients that keep their tickets apart, blocks that are written in one go."""

from __future__ import annotations

from typing import TypeVar

from kv_pool.events.types import BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.messages import (
    Acquire,
    Commit,
    Ended,
    ErrorCode,
    Grant,
    Granted,
    Hello,
    Peer,
    Pull,
    Refusal,
    Release,
    Request,
    Reserve,
    ReserveDenied,
    SlotsReserved,
)
from kv_pool.node.state import NodeState
from kv_pool.node.stimuli import Action, Asked, BlockArrived, BlockLanded, Event, Land, Publish, Send, SendBlock, StartFetch, Tick
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.settings import PoolSettings

BLOCK_TOKENS = 16
SLOT_BYTES = 64
LIMITS = PoolSettings(client_dead_s=5.0, lease_s=10.0, handoff_ttl_s=20.0, fetch_inflight_blocks=2, waiting_acquires_max=8)
PEER = Peer("node-b", "tcp://127.0.0.1:20001")
OTHER_PEER = Peer("node-c", "tcp://127.0.0.1:20002")
PIDS = {"w": 100, "r": 200, "far": 0}

T = TypeVar("T")


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16))


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(key(i) for i in numbers)


def make_state(slots: int = 4, limits: PoolSettings = LIMITS) -> NodeState:
    return NodeState(
        node_id="node-a",
        slots=slots,
        slot_bytes=SLOT_BYTES,
        block_tokens=BLOCK_TOKENS,
        settings=limits,
        policy=LeastRecentlyUsed(),
    )


class Scene:
    """Clients ``w`` and ``r`` run on this machine, ``far`` is another node. Every event is followed by a full check."""

    def __init__(self, slots: int = 4, limits: PoolSettings = LIMITS) -> None:
        self.state = make_state(slots, limits)
        self.now = 0.0
        self.ticket = 0
        self.greet()

    def greet(self) -> None:
        for name, pid in PIDS.items():
            self.do(name, Hello(pid, 1))

    def happens(self, event: Event) -> list[Action]:
        actions = self.state.handle(event, self.now)
        self.state.check()
        return actions

    def do(self, client: str, request: Request) -> list[Action]:
        return self.happens(Asked(client, request))

    def tick(self, now: float) -> list[Action]:
        self.now = now
        return self.happens(Tick())

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    def ask_reserve(
        self,
        wanted: tuple[BlockKey, ...],
        *,
        client: str = "w",
        private: bool = False,
        timeout_s: float = 1.0,
        parent: BlockKey | None = None,
    ) -> list[Action]:
        return self.do(client, Reserve(self.next_ticket(), wanted, parent, timeout_s, private))

    def reserve(self, *numbers: int, client: str = "w", private: bool = False) -> tuple[int | None, ...]:
        """The slots, which must be there at once."""
        (reserved,) = answers(self.ask_reserve(keys(*numbers), client=client, private=private), SlotsReserved)
        return reserved.slots

    def commit(
        self, slot: int | None, k: BlockKey, parent: BlockKey | None = None, *, client: str = "w", tokens: int = BLOCK_TOKENS
    ) -> list[Action]:
        assert slot is not None
        return self.do(client, Commit(slot, k, parent, tokens, 10, 7, b""))

    def put(self, *numbers: int, private: bool = False) -> list[Action]:
        """Write a chain."""
        actions: list[Action] = []
        parent = None
        for k in keys(*numbers):
            granted = self.ask_reserve((k,), private=private)
            ((slot,),) = (a.slots for a in answers(granted, SlotsReserved))
            actions += granted
            if slot is not None:
                actions += self.commit(slot, k, parent)
            parent = k
        return actions

    def acquire(
        self, *numbers: int, wait: bool = False, source: Peer | None = None, timeout_s: float = 4.0, client: str = "r",
        sources: tuple[Peer, ...] = (),
    ) -> list[Action]:  # fmt: skip
        sources = sources or (() if source is None else (source,))
        return self.do(client, Acquire(self.next_ticket(), keys(*numbers), wait, timeout_s, sources))

    def pull(self, *numbers: int, wait: bool = False, timeout_s: float = 4.0, credits_: int = 8) -> list[Action]:
        return self.do("far", Pull(self.next_ticket(), keys(*numbers), wait, timeout_s, credits_))

    def lease(self, number: int) -> Grant:
        (grant,) = grants(self.acquire(number))
        return grant

    def release(self, grant: Grant, *, consume: bool = False, client: str = "r") -> list[Action]:
        return self.do(client, Release((grant.lease,), consume))

    def arrives(self, fetch: int, number: int, *, sound: bool = True, private: bool = False, retention: int = 0) -> list[Action]:
        """A block of a fetch comes in, and lands where the state says."""
        commit = Commit(-1, key(number), None, BLOCK_TOKENS, 10, 7, b"")
        actions = self.happens(BlockArrived(fetch, commit, private, retention=retention))
        for land in [a for a in actions if isinstance(a, Land)]:
            actions += self.happens(BlockLanded(land.slot, sound))
        return actions

    def leases(self) -> set[int]:
        return {lease for client in self.state.clients.values() for lease in client.leases}

    def has(self, number: int) -> bool:
        return self.state.blocks.get(key(number)) is not None


def answers(actions: list[Action], kind: type[T]) -> list[T]:
    return [a.answer for a in actions if isinstance(a, Send | SendBlock) and isinstance(a.answer, kind)]


def grants(actions: list[Action]) -> list[Grant]:
    return [grant for granted in answers(actions, Granted) for grant in granted.grants()]


def fetches(actions: list[Action]) -> list[StartFetch]:
    return [a for a in actions if isinstance(a, StartFetch)]


def ended(actions: list[Action]) -> list[Ended]:
    """Also those that a last grant ends."""
    whole = [Ended(g.ticket, g.position + g.count, None) for g in answers(actions, Granted) if g.ended]
    return whole + answers(actions, Ended)


def denied(actions: list[Action]) -> list[str]:
    return [a.reason for a in answers(actions, ReserveDenied)]


def refusals(actions: list[Action]) -> list[ErrorCode]:
    return [a.code for a in answers(actions, Refusal)]


def stored(actions: list[Action]) -> list[BlockKey]:
    return [k for a in actions if isinstance(a, Publish) and isinstance(a.event, BlockStored) for k in a.event.keys]


def removed(actions: list[Action]) -> list[BlockKey]:
    return [k for a in actions if isinstance(a, Publish) and isinstance(a.event, BlockRemoved) for k in a.event.keys]
