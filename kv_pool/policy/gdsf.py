"""Greedy-Dual-Size-Frequency: a block is worth its uses on top of the age at which it was used last.

    value = age when last used + uses · cost / size        age = value of the last victim

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998. Blocks are
all of one size, and the cost is taken as one: what a block's recompute is worth by its place in a prompt is not known here."""

from __future__ import annotations

from kv_pool.keys import BlockKey
from kv_pool.policy.lfu import RankedHeap


class GreedyDualSizeFrequency:
    """Never names a discarded key."""

    def __init__(self) -> None:
        self._age = 0.0
        self._uses: dict[BlockKey, int] = {}
        self._value: dict[BlockKey, float] = {}
        self._ranked = RankedHeap()

    def stored(self, key: BlockKey) -> None:
        if key not in self._value:
            self._use(key)

    def touched(self, key: BlockKey) -> None:
        self._use(key)

    def add(self, key: BlockKey, last_used: float) -> None:
        if key not in self._value:
            self._use(key)
        self._ranked.put(key, (self._value[key], last_used))

    def discard(self, key: BlockKey) -> None:
        self._ranked.drop(key)

    def removed(self, key: BlockKey) -> None:
        self._uses.pop(key, None)
        self._value.pop(key, None)
        self._ranked.drop(key)

    def pop(self) -> BlockKey | None:
        found = self._ranked.pop()
        if found is None:
            return None
        key, (value, _) = found
        self._age = max(self._age, value)
        return key

    def _use(self, key: BlockKey) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1
        self._value[key] = self._age + self._uses[key]
