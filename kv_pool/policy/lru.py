"""Least recently used first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kv_pool.keys import BlockKey

STALE_SHARE_MAX = 4
"""The heap is rebuilt when it is this many times larger than what it stands for."""


@dataclass(slots=True)
class LeastRecentlyUsed:
    """A heap by time of last use, cleaned lazily: O(log n) per call, amortised."""

    _heap: list[tuple[float, BlockKey]] = field(default_factory=list[tuple[float, BlockKey]])
    _live: dict[BlockKey, float] = field(default_factory=dict[BlockKey, float])

    def add(self, key: BlockKey, last_used: float) -> None:
        if self._live.get(key) == last_used:
            return
        self._live[key] = last_used
        heapq.heappush(self._heap, (last_used, key))
        if len(self._heap) > STALE_SHARE_MAX * len(self._live) + 64:
            self._heap = [(used, k) for k, used in self._live.items()]
            heapq.heapify(self._heap)

    def discard(self, key: BlockKey) -> None:
        self._live.pop(key, None)

    def pop(self) -> BlockKey | None:
        while self._heap:
            used, key = heapq.heappop(self._heap)
            if self._live.get(key) == used:
                del self._live[key]
                return key
        return None
