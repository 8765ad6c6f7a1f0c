"""Least recently used first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kv_pool.keys import BlockKey

STALE_SHARE_MAX = 4
"""The heap is rebuilt when it is this many times larger than what it stands for."""


@dataclass(slots=True)
class LeastRecentlyUsed:
    """A heap by time of last use. A use only notes the new time: the entry moves when it comes to the top with an old one.
    So ``add`` of a known key and ``discard`` cost O(1), the others O(log n), amortised. Never names a discarded key."""

    _live: dict[BlockKey, float] = field(default_factory=dict[BlockKey, float])
    _queued: dict[BlockKey, float] = field(default_factory=dict[BlockKey, float])
    """The time under which a key lies in the heap: no later than its last use."""
    _heap: list[tuple[float, BlockKey]] = field(default_factory=list[tuple[float, BlockKey]])

    def stored(self, key: BlockKey) -> None:
        """Nothing: the order is that of use."""

    def touched(self, key: BlockKey) -> None:
        """Nothing: ``add`` says when."""

    def add(self, key: BlockKey, last_used: float) -> None:
        self._live[key] = last_used
        queued = self._queued.get(key)
        if queued is None or last_used < queued:
            self._push(key, last_used)
            if len(self._heap) > STALE_SHARE_MAX * len(self._live) + 64:
                self._rebuild()

    def discard(self, key: BlockKey) -> None:
        self._live.pop(key, None)

    def removed(self, key: BlockKey) -> None:
        self._live.pop(key, None)

    def pop(self) -> BlockKey | None:
        while self._heap:
            queued, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued:
                continue  # it lies elsewhere in the heap
            del self._queued[key]
            used = self._live.get(key)
            if used is None:
                continue
            if used == queued:
                del self._live[key]
                return key
            self._push(key, used)
        return None

    def _push(self, key: BlockKey, last_used: float) -> None:
        self._queued[key] = last_used
        heapq.heappush(self._heap, (last_used, key))

    def _rebuild(self) -> None:
        self._queued = dict(self._live)
        self._heap = [(used, key) for key, used in self._live.items()]
        heapq.heapify(self._heap)
