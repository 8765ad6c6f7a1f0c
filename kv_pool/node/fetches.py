"""Blocks on their way from other nodes. Pure. One key is fetched once, however many wait for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_pool.keys import BlockKey
from kv_pool.node.messages import Action, Peer, StartFetch

REMEMBERED_MAX = 65536
"""Keys remembered as fetched from a peer, for the tier that a grant reports."""


@dataclass(frozen=True, slots=True)
class Fetch:
    id: int
    peer: Peer
    keys: tuple[BlockKey, ...]
    wait: bool


class Fetches:
    """``window`` bounds the blocks of one fetch, and with it what one asker can have on the way (the credit window)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._fetches: dict[int, Fetch] = {}
        self._by_key: dict[BlockKey, int] = {}
        self._remote: OrderedDict[BlockKey, None] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def get(self, fetch: int) -> Fetch | None:
        return self._fetches.get(fetch)

    def fetching(self, key: BlockKey) -> bool:
        return key in self._by_key

    def of_peer(self, peer: Peer) -> list[Fetch]:
        return [fetch for fetch in self._fetches.values() if fetch.peer == peer]

    def came_from_peer(self, key: BlockKey) -> bool:
        return key in self._remote

    def start(self, peer: Peer, missing: Sequence[BlockKey], wait: bool, timeout_s: float) -> list[Action]:
        """Fetch the first keys of ``missing`` (the first one is not under way)."""
        keys: list[BlockKey] = []
        for key in missing[: self._window]:
            if key in self._by_key:
                break
            keys.append(key)
        self._next += 1
        fetch = Fetch(self._next, peer, tuple(keys), wait)
        self._fetches[fetch.id] = fetch
        for key in keys:
            self._by_key[key] = fetch.id
            self._remote[key] = None
            self._remote.move_to_end(key)
        while len(self._remote) > REMEMBERED_MAX:
            self._remote.popitem(last=False)
        return [StartFetch(fetch.id, peer, fetch.keys, wait, timeout_s)]

    def end(self, fetch: int) -> Fetch | None:
        ended = self._fetches.pop(fetch, None)
        if ended is not None:
            for key in ended.keys:
                del self._by_key[key]
        return ended
