"""Transfers from other nodes that are under way. Pure. One key is fetched once, however many acquires wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_pool.keys import BlockKey
from kv_pool.node.clients import TicketId
from kv_pool.node.messages import Miss, Peer


@dataclass(slots=True)
class Fetch:
    """``waiters`` are the acquires that need it; it is called off when the last of them goes. ``stalled``: the peer waits for the
    next key itself (keys come in order)."""

    id: int
    peer: Peer
    keys: tuple[BlockKey, ...]
    wait: bool
    deadline: float
    waiters: set[TicketId] = field(default_factory=set[TicketId])
    stalled: bool = False

    def settles(self, miss: Miss, *, wait: bool, deadline: float) -> bool:
        """Whether an acquire that waited for this fetch would get no more from the same peer by asking itself."""
        match miss:
            case Miss.NOT_FOUND:
                return self.wait or not wait
            case Miss.LATE:
                return deadline <= self.deadline
            case _:
                return True


class Fetches:
    def __init__(self) -> None:
        self._fetches: dict[int, Fetch] = {}
        self._by_key: dict[BlockKey, Fetch] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def get(self, fetch: int) -> Fetch | None:
        return self._fetches.get(fetch)

    def of_key(self, key: BlockKey) -> Fetch | None:
        return self._by_key.get(key)

    def start(self, peer: Peer, keys: tuple[BlockKey, ...], *, wait: bool, deadline: float) -> Fetch:
        """None of ``keys`` may be under way."""
        self._next += 1
        fetch = Fetch(self._next, peer, keys, wait, deadline)
        self._fetches[fetch.id] = fetch
        for key in keys:
            assert key not in self._by_key
            self._by_key[key] = fetch
        return fetch

    def end(self, fetch: int) -> Fetch | None:
        ended = self._fetches.pop(fetch, None)
        if ended is not None:
            for key in ended.keys:
                del self._by_key[key]
        return ended

    def memberships(self) -> set[tuple[int, TicketId]]:
        """(fetch, acquire) for each that waits; every fetch has at least one. For tests."""
        assert all(fetch.waiters for fetch in self._fetches.values())
        return {(fetch.id, waiter) for fetch in self._fetches.values() for waiter in fetch.waiters}
