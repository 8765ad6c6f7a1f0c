"""Least recently used first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from kv_pool.keys import BlockKey

STALE_SHARE_MAX = 4
"""The heap is rebuilt when it is this many times larger than what it stands for."""


@dataclass(slots=True)
class LeastRecentlyUsed:
    """Time mostly goes forward, so most keys are added with the latest time so far: they stand in a plain order, and cost O(1).
    The others (a parent whose last child has gone was used long ago) lie in a heap by time of last use, O(log n), amortised.
    Never names a discarded key."""

    _order: OrderedDict[BlockKey, float] = field(default_factory=OrderedDict[BlockKey, float])
    _late: dict[BlockKey, float] = field(default_factory=dict[BlockKey, float])
    """What is in the heap; entries of it that say otherwise are stale."""
    _heap: list[tuple[float, BlockKey]] = field(default_factory=list[tuple[float, BlockKey]])
    _newest: float = float("-inf")

    def stored(self, key: BlockKey) -> None:
        """Nothing: the order is that of use."""

    def touched(self, key: BlockKey) -> None:
        """Nothing: ``add`` says when."""

    def add(self, key: BlockKey, last_used: float) -> None:
        if last_used >= self._newest:
            self._newest = last_used
            self._order[key] = last_used
            self._order.move_to_end(key)
            if self._late:
                self._late.pop(key, None)
        elif self._order.get(key) != last_used and self._late.get(key) != last_used:
            self._order.pop(key, None)
            self._late[key] = last_used
            heapq.heappush(self._heap, (last_used, key))
            if len(self._heap) > STALE_SHARE_MAX * len(self._late) + 64:
                self._heap = [(used, late) for late, used in self._late.items()]
                heapq.heapify(self._heap)

    def discard(self, key: BlockKey) -> None:
        self._order.pop(key, None)
        if self._late:
            self._late.pop(key, None)

    removed = discard

    def pop(self) -> BlockKey | None:
        if not self._heap:
            return self._order.popitem(last=False)[0] if self._order else None
        heap, late = self._heap, self._late
        while heap and late.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if heap and (not self._order or heap[0][0] < next(iter(self._order.values()))):
            _, key = heapq.heappop(heap)
            del late[key]
            return key
        return self._order.popitem(last=False)[0] if self._order else None
