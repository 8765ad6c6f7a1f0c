"""A hash table from block keys to small numbers for a million keys: 12 to 40 bytes a key, and many look-ups at once.

::

    key 16 bytes ──xor of its halves──▶ word      64 bits, stands for the key
    bucket = word mod buckets:   | w w w w w w w w |  one cache line of words
                                 | v v v v v v v v |  their values, 0 = empty

A dict of a million keys costs a hundred bytes a key and, for each look-up, a wait for memory: 128 of them 28 to 45 µs. Here numpy
fetches all buckets of a chain in one call, where the processor overlaps the waits: 15 µs on the same machine.

Two keys with equal words would be taken for one another: one chance in 10**13 for a look-up among a million keys, since keys are
digests. In the index that costs a typed miss and a recompute. Keys that find their bucket full lie in a dict beside the table.
Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_pool.keys import KEY_BYTES, BlockKey

WAYS: Final = 8
"""Words in a bucket: 64 bytes."""
BUCKETS_MIN: Final = 128
KEYS_PER_BUCKET_MAX: Final = 5
"""On average, beyond which the number of buckets is doubled: some 2 % of the keys are beside the table by then."""
KEYS_AT_ONCE: Final = 65536
"""How many are best given to the methods for many: numpy takes some 100 bytes for each while it works."""

Words = NDArray[np.uint64]
Values = NDArray[np.uint32]

_HALF: Final = KEY_BYTES // 2


def word_of(key: BlockKey) -> int:
    """What stands for ``key``."""
    return int.from_bytes(key[:_HALF], sys.byteorder) ^ int.from_bytes(key[_HALF:], sys.byteorder)


def words_of(keys: Iterable[BlockKey]) -> Words:
    """As :func:`word_of`, for many. Raises ValueError where a key is not of 16 bytes and the sum shows it."""
    halves = np.frombuffer(b"".join(keys), np.uint64)
    return np.bitwise_xor(halves[0::2], halves[1::2])


class KeyTable:
    """Values are 1 .. 2**32 - 1; 0 says absent, and setting it removes. Costs O(1) a key, amortised; growing pauses for some
    60 ns a key."""

    def __init__(self) -> None:
        self._beside: dict[int, int] = {}
        self._size = 0
        self._use(np.zeros((BUCKETS_MIN, WAYS), np.uint64), np.zeros(BUCKETS_MIN * WAYS, np.uint32))

    def __len__(self) -> int:
        return self._size

    @property
    def bytes_used(self) -> int:
        """Memory of the table without what lies beside it."""
        return self._words.nbytes + self._values.nbytes

    # --- one key --------------------------------------------------------------------------------------------------------

    def get(self, word: int) -> int:
        place = self._place(word)
        return self._beside.get(word, 0) if place is None else self._value_at[place]

    def put(self, word: int, value: int) -> None:
        place = self._place(word)
        if place is not None:
            self._value_at[place] = value
            if not value:
                self._word_at[place] = 0
                self._size -= 1
        elif word in self._beside:
            if value:
                self._beside[word] = value
            else:
                del self._beside[word]
                self._size -= 1
        elif value:
            self._insert(word, value)

    # --- many keys ------------------------------------------------------------------------------------------------------

    def prefix(self, words: Words) -> Values:
        """The values of the leading ``words`` up to the first that is absent."""
        values = self._find(words)[1]
        if values.all():
            return values
        for position in np.flatnonzero(values == 0).tolist():
            beside = self._beside.get(int(words[position]))
            if beside is None:
                return values[:position]
            values[position] = beside
        return values

    def get_many(self, words: Words) -> Values:
        values = self._find(words)[1]
        for position in self._lie_beside(words, np.flatnonzero(values == 0)):
            values[position] = self._beside[int(words[position])]
        return values

    def put_many(self, words: Words, values: Values) -> None:
        """``words`` must all be different."""
        places, old = self._find(words)
        here = old != 0
        self._values[places[here]] = values[here]
        gone = places[here & (values == 0)]
        self._words.reshape(-1)[gone] = 0
        self._size -= len(gone)
        rest = np.flatnonzero(~here)
        if beside := self._lie_beside(words, rest):
            for i in beside:
                self.put(int(words[i]), int(values[i]))
            rest = np.setdiff1d(rest, np.array(beside, np.int64))
        rest = rest[values[rest] != 0]
        while self._size + len(rest) > KEYS_PER_BUCKET_MAX * (self._last_bucket + 1):
            self._grow()
        self._insert_many(words[rest], values[rest])

    def used(self, count: int) -> NDArray[np.bool_]:
        """For each value below ``count``: whether any key has it."""
        used = np.bincount(self._values, minlength=count) > 0
        used[list(self._beside.values())] = True
        return used

    def replace(self, new: Values) -> None:
        """Give each key that has value ``v`` the value ``new[v]``; ``new[0]`` must be 0."""
        self._values[:] = new[self._values]
        self._words.reshape(-1)[self._values == 0] = 0
        self._beside = {word: int(new[value]) for word, value in self._beside.items() if new[value]}
        self._size = int(np.count_nonzero(self._values)) + len(self._beside)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _use(self, words: NDArray[np.uint64], values: Values) -> None:
        self._words, self._values = words, values
        self._word_at, self._value_at = words.reshape(-1).data, values.data
        self._last_bucket = len(words) - 1
        self._mask = np.uint64(self._last_bucket)

    def _place(self, word: int) -> int | None:
        start = (word & self._last_bucket) * WAYS
        bucket = self._word_at[start : start + WAYS].tolist()
        return start + bucket.index(word) if word and word in bucket else None

    def _insert(self, word: int, value: int) -> None:
        if self._size >= KEYS_PER_BUCKET_MAX * (self._last_bucket + 1):
            self._grow()
        self._size += 1
        start = (word & self._last_bucket) * WAYS
        bucket = self._word_at[start : start + WAYS].tolist()
        if word and 0 in bucket:
            place = start + bucket.index(0)
            self._word_at[place], self._value_at[place] = word, value
        else:
            self._beside[word] = value

    def _find(self, words: Words) -> tuple[NDArray[np.int64], Values]:
        """For each word a place in the table, and the value there: 0 where the table has not got it."""
        buckets = (words & self._mask).view(np.int64)
        same = self._words.take(buckets, axis=0) == words[:, None]
        ways = same.argmax(axis=1)
        places: NDArray[np.int64] = buckets * WAYS + ways
        values: Values = self._values[places]
        values *= same[np.arange(len(words)), ways]
        return places, values

    def _lie_beside(self, words: Words, positions: NDArray[np.int64]) -> list[int]:
        """Those of ``positions`` whose words are in the dict."""
        if not self._beside:
            return []
        wanted = zip(positions.tolist(), words[positions].tolist(), strict=True)
        return [position for position, word in wanted if word in self._beside]

    def _insert_many(self, words: Words, values: Values) -> None:
        """All of ``words`` are new, and there are buckets enough."""
        buckets = (words & self._mask).view(np.int64)
        order = np.argsort(buckets, kind="stable")
        words, values, buckets = words[order], values[order], buckets[order]
        first = np.searchsorted(buckets, buckets)
        rank = np.arange(len(words)) - first  # among those that want the same bucket
        free = self._words[buckets] == 0
        chosen = free & (np.cumsum(free, axis=1) == rank[:, None] + 1)
        ways = chosen.argmax(axis=1)
        fits = chosen[np.arange(len(words)), ways] & (words != 0)
        places = (buckets * WAYS + ways)[fits]
        self._words.reshape(-1)[places] = words[fits]
        self._values[places] = values[fits]
        self._beside.update(zip(words[~fits].tolist(), values[~fits].tolist(), strict=True))
        self._size += len(words)

    def _grow(self) -> None:
        """Twice the buckets: each splits by one more bit of its words."""
        count = self._last_bucket + 1
        words, values = self._words, self._values.reshape(-1, WAYS)
        moves = (words & np.uint64(count)) != 0
        stay = ~moves
        self._use(np.concatenate((words * stay, words * moves)), np.concatenate((values * stay, values * moves)).reshape(-1))
        beside, self._beside = self._beside, {}
        self._size -= len(beside)
        for word, value in beside.items():
            self._insert(word, value)
