"""Which device blocks are free, held, cached. Pure bookkeeping: no tensor, no clock.

| state  | meaning                                          | leaves it by                     |
|--------|--------------------------------------------------|----------------------------------|
| free   | content void                                     | allocate, extend                 |
| held   | refcount > 0                                     | the last free()                  |
| cached | refcount 0, holds the K/V of a registered key    | lookup (held), eviction (free)   |

Attention on a CPU reads a *run* of neighbouring blocks as a view and pays a gather for anything else, so a run is worth more
than the least recently used order of single blocks: ``allocate`` takes the run whose youngest cached block is the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.cache.prefix import PrefixIndex
from kv_pool.keys import BlockKey

FREE: Final = 0
"""Age of a free block: older than every cached one."""
HELD: Final = np.iinfo(np.int64).max
"""Age of a held block: never old enough to go."""


class OutOfBlocksError(Exception):
    """Fewer blocks are free or evictable than were asked for. Nothing was taken."""


def is_run(blocks: Sequence[int]) -> bool:
    """Are these neighbours in ascending order?"""
    return all(b - a == 1 for a, b in pairwise(blocks))


class BlockAllocator:
    """``count`` blocks, numbered 0 .. count - 1."""

    def __init__(self, count: int) -> None:
        if count <= 0:
            raise ValueError(f"a cache needs at least one block, got {count}")
        self.count = count
        self._age: NDArray[np.int64] = np.full(count, FREE, dtype=np.int64)
        self._references: list[int] = [0] * count
        self._index = PrefixIndex()
        self._tick = FREE
        self._available = count

    @property
    def available(self) -> int:
        """Blocks that an allocation may take: free and cached ones."""
        return self._available

    def allocate(self, count: int, *, room: int = 0) -> list[int]:
        """``count`` blocks with one reference each, as one run where there is one; see the module for which.

        Among equally good runs one with ``room`` more unheld blocks behind it is preferred. Evicts cached blocks as needed.
        Raises OutOfBlocksError, changing nothing.
        """
        if count <= 0:
            return []
        self._check(count)
        start = self._best_run(count, room)
        blocks = list(range(start, start + count)) if start is not None else self._oldest(count)
        self._take(blocks)
        return blocks

    def extend(self, blocks: Sequence[int], count: int) -> list[int]:
        """``count`` blocks to follow ``blocks``: right behind the last one where nobody holds those, else as ``allocate``."""
        if count <= 0:
            return []
        self._check(count)
        if blocks:
            start = blocks[-1] + 1
            behind = self._age[start : start + count]
            if len(behind) == count and bool((behind != HELD).all()):
                grown = list(range(start, start + count))
                self._take(grown)
                return grown
        return self.allocate(count)

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference each; the blocks are held or cached."""
        for block in blocks:
            assert self._references[block] > 0 or self._index.holds(block), f"block {block} is free"
            if self._references[block] == 0:
                self._age[block] = HELD
                self._available -= 1
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less each. A block without references stays cached where it is registered."""
        for block in reversed(blocks):  # the end of a chain first: it then is older than what it depends on
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._available += 1
                if self._index.holds(block):
                    self._touch(block)
                else:
                    self._age[block] = FREE

    def register(self, key: BlockKey, block: int, parent: BlockKey | None) -> None:
        """``block``, which the caller holds, is full and holds the K/V of ``key``. A key keeps its first block."""
        assert self._references[block] > 0, f"block {block} is not held"
        self._index.add(key, block, parent)

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest cached prefix of ``keys``, one reference each for the caller."""
        found = self._index.longest_prefix(keys)
        self.retain(found)
        return found

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _check(self, count: int) -> None:
        if count > self._available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self._available} of {self.count} are free or evictable")

    def _touch(self, block: int) -> None:
        """``block`` becomes the youngest but for its unheld ancestors, which stay younger than it."""
        self._tick += 1
        self._age[block] = self._tick
        for ancestor in self._index.ancestors(block):
            if self._age[ancestor] != HELD:
                self._tick += 1
                self._age[ancestor] = self._tick

    def _best_run(self, count: int, room: int) -> int | None:
        """Start of a run of ``count`` unheld blocks whose youngest is the oldest; None where there is none."""
        ages = np.unique(self._age[self._age != HELD])  # sorted; [0] is FREE where a block is free
        low, high = 0, len(ages) - 1
        if self._runs(int(ages[high]), count)[0].size == 0:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._runs(int(ages[middle]), count)[0].size:
                high = middle
            else:
                low = middle + 1
        starts, ends = self._runs(int(ages[low]), count)
        lengths = ends - starts
        roomy = np.flatnonzero(lengths >= count + room)
        # Best fit keeps the long runs whole; without one that is roomy, the longest leaves the most room.
        best = roomy[np.argmin(lengths[roomy])] if roomy.size else np.argmax(lengths)
        return int(starts[best])

    def _runs(self, age_max: int, length_min: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and ends of the runs of at least ``length_min`` blocks no younger than ``age_max``."""
        old = np.zeros(self.count + 2, dtype=np.int8)
        old[1:-1] = self._age <= age_max
        edges = np.flatnonzero(np.diff(old))
        starts, ends = edges[::2], edges[1::2]
        long = ends - starts >= length_min
        return starts[long], ends[long]

    def _oldest(self, count: int) -> list[int]:
        order = np.argsort(self._age, kind="stable")[:count]
        return sorted(order.tolist())

    def _take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._index.holds(block):
                self._evict(block)
            self._age[block] = HELD
            self._references[block] = 1
        self._available -= len(blocks)

    def _evict(self, block: int) -> None:
        """Forget ``block`` and what continues it: a lookup can't reach past a gap. Held ones serve their holders on."""
        for gone in (*self._index.descendants(block), block):
            if self._age[gone] != HELD:
                self._index.remove(gone)
                self._age[gone] = FREE
