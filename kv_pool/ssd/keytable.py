"""A hash table from key to row, a quarter of a dict with its keys and numbers. Pure.

Keys lie in one bytearray, 16 bytes a row; the table holds row numbers only and is split into shards that grow one at a time, so
no single insertion has to rehash a million keys. Linear probing by Python's own keyed hash: nobody can aim for collisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from kv_pool.keys import KEY_BYTES, BlockKey

NONE: Final = 0xFFFFFFFF
"""No row."""

SHARD_BITS: Final = 8
SHARDS: Final = 1 << SHARD_BITS
SLOTS_MIN: Final = 8


class KeyTable:
    """Rows are numbers that the owner chooses, without gaps at the end. Keys have 16 bytes."""

    __slots__ = ("_keys", "_shards", "_used")

    def __init__(self) -> None:
        self._keys = bytearray()
        self._shards = [array("I", [NONE]) * SLOTS_MIN for _ in range(SHARDS)]
        self._used = array("I", bytes(4 * SHARDS))

    def __len__(self) -> int:
        return sum(self._used)

    def __iter__(self) -> Iterator[int]:
        """All rows, in no order."""
        return (row for shard in self._shards for row in shard if row != NONE)

    def key(self, row: int) -> BlockKey:
        return BlockKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def row(self, key: BlockKey) -> int | None:
        digest = hash(key)
        shard = self._shards[digest & (SHARDS - 1)]
        mask = len(shard) - 1
        slot = digest >> SHARD_BITS & mask
        while (row := shard[slot]) != NONE:
            if self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] == key:
                return row
            slot = (slot + 1) & mask
        return None

    def add(self, key: BlockKey, row: int) -> None:
        """``key`` must be new; ``row`` is one that was removed, or the next after the last."""
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        digest = hash(key)
        number = digest & (SHARDS - 1)
        self._used[number] += 1
        if 3 * self._used[number] > 2 * len(self._shards[number]):
            self._grow(number)
        self._put(self._shards[number], digest, row)

    def remove(self, row: int) -> None:
        """``row`` must be there."""
        digest = hash(self.key(row))
        number = digest & (SHARDS - 1)
        shard = self._shards[number]
        mask = len(shard) - 1
        hole = digest >> SHARD_BITS & mask
        while shard[hole] != row:
            hole = (hole + 1) & mask
        # Whatever would not be found past the hole moves into it.
        slot = (hole + 1) & mask
        while (other := shard[slot]) != NONE:
            home = hash(self.key(other)) >> SHARD_BITS & mask
            if (slot - home) & mask >= (slot - hole) & mask:
                shard[hole] = other
                hole = slot
            slot = (slot + 1) & mask
        shard[hole] = NONE
        self._used[number] -= 1

    def _grow(self, number: int) -> None:
        old = self._shards[number]
        new = self._shards[number] = array("I", [NONE]) * (2 * len(old))
        for row in old:
            if row != NONE:
                self._put(new, hash(self.key(row)), row)

    def _put(self, shard: array[int], digest: int, row: int) -> None:
        mask = len(shard) - 1
        slot = digest >> SHARD_BITS & mask
        while shard[slot] != NONE:
            slot = (slot + 1) & mask
        shard[slot] = row
