"""Who holds which block: for each key the nodes and media that have it, as the bits of an integer. Pure.

::

    slot (a node)      1           0
    medium          3 2 1 0     3 2 1 0        0 = the fastest
    bit             7 6 5 4     3 2 1 0

Keys that come one behind the other mostly have the same holders. So each different integer (*mask*) is kept once and numbered,
the table gives a key its number, and what is done in Python is done once per *run* of equal numbers: one ``&`` follows all nodes
at once. When a node goes, its bits are taken out of the masks, not of the keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_pool.events.types import DRAM, SSD
from kv_pool.keys import BlockKey
from scheduler.key_table import KEYS_AT_ONCE, KeyTable, Words, word_of, words_of

MEDIA_MAX: Final = 4
MEDIA_FASTEST_FIRST: Final = (DRAM, SSD)
ONE_BY_ONE_MAX: Final = 48
"""Keys of one change up to which numpy would take longer."""
SLOTS_ONE_BY_ONE_MAX: Final = 24
"""Slots of one mask up to which numpy would take longer."""
MASKS_MIN: Final = 1024
"""Different masks before it is worth looking for those that nothing uses any more."""

_ALL_MEDIA: Final = (1 << MEDIA_MAX) - 1
Ints = NDArray[np.int64]


class BlockTable:
    """``open`` gives a slot, a small number that stands for a node until ``close``. At most ``keys_max`` different keys are kept;
    what comes beyond is counted in ``dropped`` and simply not known, which costs a recompute."""

    def __init__(self, keys_max: int, media: Sequence[str] = MEDIA_FASTEST_FIRST) -> None:
        self.entries = 0
        """(slot, medium, key) triples of open slots."""
        self.dropped = 0
        self._keys_max = keys_max
        self._media = list(media)
        self._table = KeyTable()
        self._masks = [0]
        """By number. Number 0 is that of absent keys; after a ``close`` several may have the same mask, or none (0)."""
        self._numbers: dict[int, int] = {}
        self._free_numbers: list[int] = []
        self._masks_max = MASKS_MIN
        self._empty = False
        """Whether keys may be in the table that nobody has any more."""
        self._counts: dict[int, int] = {}
        """Entries of each open slot."""
        self._free_slots: list[int] = []
        self._holders: list[tuple[int, int] | None] = [None]
        """By number, as :meth:`_note_holders` found it; None where nobody has asked since the mask is another."""

    # --- slots ----------------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """A slot that has nothing."""
        slot = self._free_slots.pop() if self._free_slots else len(self._counts)
        self._counts[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """The slot is nobody's any more, and what it had is forgotten. Costs a step per different mask, whatever it had."""
        count = self._counts.pop(slot)
        self._free_slots.append(slot)
        if not count:
            return
        self.entries -= count
        bits = ~(_ALL_MEDIA << slot * MEDIA_MAX)
        self._masks = [mask & bits for mask in self._masks]
        self._holders = [None] * len(self._masks)
        self._numbers = {mask: number for number, mask in enumerate(self._masks) if mask}
        self._empty = True

    # --- changes --------------------------------------------------------------------------------------------------------

    def add(self, slot: int, medium: str, keys: Collection[BlockKey]) -> None:
        """Note that ``slot`` has ``keys`` on ``medium``; those noted before stay."""
        bit = self._bit(slot, medium)
        if bit is None:
            self.dropped += len(keys)
            return
        if len(keys) > ONE_BY_ONE_MAX:
            words = words_of(keys)
            for start in range(0, len(words), KEYS_AT_ONCE):
                self._add_many(slot, bit, _different(words[start : start + KEYS_AT_ONCE]))
            return
        table, masks, added = self._table, self._masks, 0
        for key in keys:
            word = word_of(key)
            number = table.get(word)
            mask = masks[number]
            if mask & bit:
                continue
            if not number and self._room(1) <= 0:
                self.dropped += 1
                continue
            table.put(word, self._number(mask | bit))
            added += 1
        self._count(slot, added)

    def discard(self, slot: int, medium: str, keys: Collection[BlockKey]) -> None:
        """``slot`` no longer has ``keys`` on ``medium``; those it never had are ignored."""
        bit = self._bit(slot, medium)
        if bit is None:
            return
        table, removed = self._table, 0
        for key in keys:
            word = word_of(key)
            mask = self._masks[table.get(word)]
            if mask & bit:
                table.put(word, self._number(mask ^ bit))
                removed += 1
        self._count(slot, -removed)

    # --- questions ------------------------------------------------------------------------------------------------------

    def prefixes(self, keys: Sequence[BlockKey]) -> tuple[Ints, Ints]:
        """By slot, with a zero behind the last: how many of the leading ``keys`` it has without a hole, and how many of these
        come before the first that it has on slower media only."""
        slots = len(self._counts) + len(self._free_slots)
        blocks = np.zeros(slots + 1, np.int64)
        numbers = self._table.prefix(words_of(keys))
        count = len(numbers)
        fast_first = np.full(slots + 1, count)
        if count:
            starts: list[int] = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
            alive: int = self._lowest_bits(slots)
            fast = alive
            at_starts: list[int] = numbers[starts].tolist()
            for start, number in zip(starts, at_starts, strict=True):
                anywhere, fastest = self._holders[number] or self._note_holders(number)
                slower = fast & anywhere & ~fastest
                if slower:
                    _fill(fast_first, slower, start)
                    fast ^= slower
                if alive & ~anywhere:
                    _fill(blocks, alive & ~anywhere, start)
                    alive &= anywhere
                    if not alive:
                        break
            _fill(blocks, alive, count)
        return blocks, np.minimum(blocks, fast_first)

    def _lowest_bits(self, slots: int) -> int:
        """The lowest bit of each slot."""
        return ((1 << slots * MEDIA_MAX) - 1) // _ALL_MEDIA

    def _note_holders(self, number: int) -> tuple[int, int]:
        """For each slot that has any bit in the mask its lowest bit; and only for those that have the bit of the fastest
        medium."""
        mask = self._masks[number]
        fastest = mask & self._lowest_bits(mask.bit_length() // MEDIA_MAX + 1)
        found = self._holders[number] = (self._holding(mask), fastest)
        return found

    def holders(self, key: BlockKey) -> list[tuple[int, str]]:
        """All (slot, medium) that have ``key``, in order."""
        mask = self._masks[self._table.get(word_of(key))]
        return sorted(
            (slot, medium)
            for slot in _slots(self._holding(mask))
            for place, medium in enumerate(self._media)
            if mask >> slot * MEDIA_MAX + place & 1
        )

    def count(self, slot: int) -> int:
        """Entries of an open slot over all media."""
        return self._counts[slot]

    @property
    def bytes_used(self) -> int:
        """Memory of the table itself: what grows with the number of keys."""
        return self._table.bytes_used

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _holding(self, mask: int) -> int:
        """For each slot that has any bit in ``mask`` its lowest bit, and no bit but such."""
        anywhere = mask
        for place in range(1, len(self._media)):
            anywhere |= mask >> place
        return anywhere & self._lowest_bits(mask.bit_length() // MEDIA_MAX + 1)

    def _bit(self, slot: int, medium: str) -> int | None:
        """The bit that a change is about; None for one medium too many."""
        if len(self._masks) - len(self._free_numbers) > self._masks_max:
            self._collect()
        if medium not in self._media:
            if len(self._media) >= MEDIA_MAX:
                return None
            self._media.append(medium)
        return 1 << slot * MEDIA_MAX + self._media.index(medium)

    def _count(self, slot: int, added: int) -> None:
        self._counts[slot] += added
        self.entries += added

    def _add_many(self, slot: int, bit: int, words: Words) -> None:
        numbers = self._table.get_many(words)
        room = self._room(int(np.count_nonzero(numbers == 0)))
        fits = (numbers != 0) | (np.cumsum(numbers == 0) <= room)
        self.dropped += int(np.count_nonzero(~fits))
        words, numbers = words[fits], numbers[fits]
        keys_of_number = np.bincount(numbers)
        new, added = np.arange(len(keys_of_number), dtype=np.uint32), 0
        for i in np.flatnonzero(keys_of_number):
            mask = self._masks[int(i)]
            if not mask & bit:
                new[i] = self._number(mask | bit)
                added += int(keys_of_number[i])
        self._table.put_many(words, new[numbers])
        self._count(slot, added)

    def _room(self, wanted: int) -> int:
        """How many keys may still come. Where that is less than ``wanted``, those that nobody has any more go first."""
        if len(self._table) + wanted > self._keys_max:
            self._drop_empty()
        return self._keys_max - len(self._table)

    def _number(self, mask: int) -> int:
        """The number of ``mask``; 0 for that of absent keys."""
        if not mask:
            return 0
        number = self._numbers.get(mask)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._masks[number] = mask
                self._holders[number] = None
            else:
                number = len(self._masks)
                self._masks.append(mask)
                self._holders.append(None)
            self._numbers[mask] = number
        return number

    def _collect(self) -> None:
        """Find the numbers that no key has any more. Only between two changes: within one, a number may be given out already and
        not yet be in the table."""
        self._drop_empty()
        used = self._table.used(len(self._masks))
        self._free_numbers = [number for number in range(1, len(self._masks)) if not used[number]]
        for number in self._free_numbers:
            self._numbers.pop(self._masks[number], None)
            self._masks[number] = 0
            self._holders[number] = None
        self._masks_max = max(MASKS_MIN, 2 * (len(self._masks) - len(self._free_numbers)))

    def _drop_empty(self) -> None:
        """Take keys that nobody has out of the table, and give those with equal masks equal numbers."""
        if self._empty:
            self._table.replace(np.array([self._numbers.get(mask, 0) for mask in self._masks], np.uint32))
            self._empty = False


def _fill(column: Ints, lowest: int, value: int) -> None:
    """Set ``value`` for the slots whose lowest bit is in ``lowest``."""
    if lowest.bit_count() > SLOTS_ONE_BY_ONE_MAX:
        size = (lowest.bit_length() + 7) // 8
        bits = np.unpackbits(np.frombuffer(lowest.to_bytes(size, "little"), np.uint8), bitorder="little")
        here = bits[::MEDIA_MAX]
        column[: len(here)][here != 0] = value
        return
    while lowest:
        top = lowest.bit_length() - 1
        column[top // MEDIA_MAX] = value
        lowest ^= 1 << top


def _different(words: Words) -> Words:
    """Without repetitions, in the same order."""
    first = np.unique(words, return_index=True)[1]
    return words if len(first) == len(words) else words[np.sort(first)]


def _slots(lowest: int) -> list[int]:
    """The slots whose lowest bit is in ``lowest``."""
    found: list[int] = []
    while lowest:
        bit = lowest & -lowest
        found.append((bit.bit_length() - 1) // MEDIA_MAX)
        lowest ^= bit
    return found
