"""The bound: Belady's MIN with bypass. It knows the future, keeps what is used again soonest, and lets a block pass that would be
used again later than all that is here."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from kv_pool.keys import BlockKey

NEVER: Final = 1 << 62


class Belady:
    """``future`` are all touches to come, in their order."""

    def __init__(self, future: Sequence[BlockKey], capacity: int) -> None:
        self._capacity = capacity
        self._next = [NEVER] * len(future)
        last: dict[BlockKey, int] = {}
        for place in range(len(future) - 1, -1, -1):
            self._next[place] = last.get(future[place], NEVER)
            last[future[place]] = place
        self._place = 0
        self.here: dict[BlockKey, int] = {}
        """When each block that is here is used next."""
        self._latest: list[tuple[int, BlockKey]] = []
        """Heap, the latest use first; entries with an outdated use are skipped."""
        self.evictions = 0

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            due = self._next[self._place]
            self._place += 1
            if key not in self.here and len(self.here) >= self._capacity:
                while self.here.get(self._latest[0][1]) != -self._latest[0][0]:
                    heapq.heappop(self._latest)
                if -self._latest[0][0] <= due:
                    continue  # it passes
                del self.here[heapq.heappop(self._latest)[1]]
                self.evictions += 1
            self.here[key] = due
            heapq.heappush(self._latest, (-due, key))
