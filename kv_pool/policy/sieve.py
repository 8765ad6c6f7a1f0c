"""SIEVE: one queue, one bit a block, and a hand that goes from the oldest to the newest and starts over.

Source: Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU", NSDI 2024. New blocks enter at the head; a use only sets
the block's bit. The hand clears the bits that it finds set and evicts the first block without one; survivors stay where they are.

Added here, because a block with readers or followers may not go: the hand passes it, and comes back to it as soon as it may go,
unless it was used meanwhile. So a chain that nobody wants leaves as a whole, leaf by leaf, when its last block's time has come.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_pool.keys import BlockKey


@dataclass(slots=True, eq=False)
class _Entry:
    key: BlockKey
    newer: _Entry | None = None
    older: _Entry | None = None
    used: bool = False
    evictable: bool = False
    passed: bool = False
    """The hand would have taken it."""


class Sieve:
    """O(1) per call, amortised, but for blocks that may not go, which each turn of the hand passes once. Never names a discarded
    key."""

    def __init__(self) -> None:
        self._entries: dict[BlockKey, _Entry] = {}
        self._newest: _Entry | None = None
        self._oldest: _Entry | None = None
        self._hand: _Entry | None = None
        self._evictable = 0

    def stored(self, key: BlockKey) -> None:
        if key not in self._entries:
            self._enter(key)

    def touched(self, key: BlockKey) -> None:
        entry = self._entries.get(key) or self._enter(key)
        entry.used, entry.passed = True, False

    def add(self, key: BlockKey, last_used: float) -> None:
        entry = self._entries.get(key) or self._enter(key)
        self._evictable += not entry.evictable
        entry.evictable = True
        if entry.passed:
            self._hand, entry.passed = entry, False

    def discard(self, key: BlockKey) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            self._evictable -= entry.evictable
            entry.evictable = False

    def removed(self, key: BlockKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._evictable -= entry.evictable
        if self._hand is entry:
            self._hand = entry.newer
        if entry.newer is not None:
            entry.newer.older = entry.older
        else:
            self._newest = entry.older
        if entry.older is not None:
            entry.older.newer = entry.newer
        else:
            self._oldest = entry.newer

    def pop(self) -> BlockKey | None:
        if not self._evictable:
            return None
        entry = self._hand or self._oldest
        while entry is not None:
            if entry.used:
                entry.used = False
            elif entry.evictable:
                break
            else:
                entry.passed = True
            entry = entry.newer or self._oldest
        if entry is None:
            return None
        self._hand = entry.newer
        entry.evictable, entry.passed = False, True
        self._evictable -= 1
        return entry.key

    def _enter(self, key: BlockKey) -> _Entry:
        entry = self._entries[key] = _Entry(key, older=self._newest)
        if self._newest is not None:
            self._newest.newer = entry
        self._newest = entry
        if self._oldest is None:
            self._oldest = entry
        return entry
