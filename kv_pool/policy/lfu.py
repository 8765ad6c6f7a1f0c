"""Least frequently used first; of equals the one that was used longest ago."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kv_pool.keys import BlockKey

STALE_SHARE_MAX = 4
"""The heap is rebuilt when it is this many times larger than what it stands for."""

Rank = tuple[float, float]


@dataclass(slots=True)
class RankedHeap:
    """Keys by rank, the smallest first. A key whose rank has grown moves when it comes to the top with its old one: so
    :meth:`put` costs O(1) for a rank that grew, O(log n) else, amortised."""

    _live: dict[BlockKey, Rank] = field(default_factory=dict[BlockKey, Rank])
    _queued: dict[BlockKey, Rank] = field(default_factory=dict[BlockKey, Rank])
    """The rank under which a key lies in the heap: no larger than its own."""
    _heap: list[tuple[Rank, BlockKey]] = field(default_factory=list[tuple[Rank, BlockKey]])

    def put(self, key: BlockKey, rank: Rank) -> None:
        self._live[key] = rank
        queued = self._queued.get(key)
        if queued is None or rank < queued:
            self._push(key, rank)
            if len(self._heap) > STALE_SHARE_MAX * len(self._live) + 64:
                self._queued = dict(self._live)
                self._heap = [(each, name) for name, each in self._live.items()]
                heapq.heapify(self._heap)

    def drop(self, key: BlockKey) -> None:
        self._live.pop(key, None)

    def pop(self) -> tuple[BlockKey, Rank] | None:
        """The key of the smallest rank and that rank; it is in no more."""
        while self._heap:
            queued, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued:
                continue  # it lies elsewhere in the heap
            del self._queued[key]
            rank = self._live.get(key)
            if rank is None:
                continue
            if rank == queued:
                del self._live[key]
                return key, rank
            self._push(key, rank)
        return None

    def _push(self, key: BlockKey, rank: Rank) -> None:
        self._queued[key] = rank
        heapq.heappush(self._heap, (rank, key))


class LeastFrequentlyUsed:
    """Counts uses while a block is known; one that comes back starts anew. Never names a discarded key."""

    def __init__(self) -> None:
        self._uses: dict[BlockKey, int] = {}
        self._ranked = RankedHeap()

    def stored(self, key: BlockKey) -> None:
        self._uses.setdefault(key, 0)

    def touched(self, key: BlockKey) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1

    def add(self, key: BlockKey, last_used: float) -> None:
        self._ranked.put(key, (self._uses.setdefault(key, 0), last_used))

    def discard(self, key: BlockKey) -> None:
        self._ranked.drop(key)

    def removed(self, key: BlockKey) -> None:
        self._uses.pop(key, None)
        self._ranked.drop(key)

    def pop(self) -> BlockKey | None:
        found = self._ranked.pop()
        return None if found is None else found[0]
