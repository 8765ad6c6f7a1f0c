"""Who holds which block: for each medium a table from block key to the set of nodes, as the bits of an integer.

One ``&`` per key then follows all nodes at once along a prefix, however many there are: 128 keys on 1,000 nodes cost 128
look-ups, not 128,000. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kv_pool.keys import BlockKey

MEDIA_MAX: Final = 8


class BlockTable:
    """``slot`` is a node's bit, a small number that the owner gives out. At most ``entries_max`` (slot, medium, key) triples are
    kept; what comes beyond is counted in ``dropped`` and simply not known, which costs a recompute."""

    def __init__(self, entries_max: int) -> None:
        self.entries = 0
        self.dropped = 0
        self._entries_max = entries_max
        self._tables: dict[str, dict[BlockKey, int]] = {}
        self._held: dict[int, dict[str, set[BlockKey]]] = {}

    def add(self, slot: int, medium: str, keys: Iterable[BlockKey]) -> None:
        """Note that ``slot`` has ``keys`` on ``medium``; those noted before stay."""
        if medium not in self._tables and len(self._tables) >= MEDIA_MAX:
            self.dropped += 1
            return
        table = self._tables.setdefault(medium, {})
        held = self._held.setdefault(slot, {}).setdefault(medium, set())
        bit = 1 << slot
        for key in keys:
            if key in held:
                continue
            if self.entries >= self._entries_max:
                self.dropped += 1
                continue
            held.add(key)
            table[key] = table.get(key, 0) | bit
            self.entries += 1

    def discard(self, slot: int, medium: str, keys: Iterable[BlockKey]) -> None:
        """``slot`` no longer has ``keys`` on ``medium``; those it never had are ignored."""
        held = self._held.get(slot, {}).get(medium)
        if held is None:
            return
        for key in keys:
            if key in held:
                held.remove(key)
                self._unset(medium, key, slot)

    def clear(self, slot: int) -> None:
        """``slot`` has nothing any more."""
        for medium, held in self._held.pop(slot, {}).items():
            for key in held:
                self._unset(medium, key, slot)

    def longest_prefix(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        """For each slot that has the first key: how many of the leading ``keys`` it has without a hole, on any medium."""
        tables = tuple(self._tables.values())
        lengths: dict[int, int] = {}
        alive = 0
        for position, key in enumerate(keys):
            mask = 0
            for table in tables:
                mask |= table.get(key, 0)
            if position:
                _note(lengths, alive & ~mask, position)
                alive &= mask
            else:
                alive = mask
            if not alive:
                return lengths
        _note(lengths, alive, len(keys))
        return lengths

    def holders(self, key: BlockKey) -> list[tuple[int, str]]:
        """All (slot, medium) that have ``key``."""
        found: list[tuple[int, str]] = []
        for medium, table in self._tables.items():
            slots: dict[int, int] = {}
            _note(slots, table.get(key, 0), 0)
            found += [(slot, medium) for slot in slots]
        return sorted(found)

    def count(self, slot: int) -> int:
        """Entries of one slot over all media."""
        return sum(len(held) for held in self._held.get(slot, {}).values())

    def _unset(self, medium: str, key: BlockKey, slot: int) -> None:
        table = self._tables[medium]
        mask = table[key] & ~(1 << slot)
        if mask:
            table[key] = mask
        else:
            del table[key]
        self.entries -= 1


def _note(lengths: dict[int, int], slots: int, length: int) -> None:
    """Write ``length`` for each bit of ``slots``."""
    while slots:
        low = slots & -slots
        lengths[low.bit_length() - 1] = length
        slots ^= low
