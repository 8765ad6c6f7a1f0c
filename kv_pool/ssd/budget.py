"""How much may still be written: so many bytes in any 24 hours, which is what a drive's endurance (DWPD) comes to. Pure.

Bytes are booked in buckets of five minutes. What is counted as spent are all buckets that reach into the last 24 hours, the
oldest one as a whole, so no window of 24 hours wherever it starts ever holds more than the budget.
"""

from __future__ import annotations

import struct
from typing import Final

from kv_pool.ssd.records import SsdFormatError

WINDOW_S: Final = 24 * 3600
BUCKET_S: Final = 300
BUCKETS: Final = WINDOW_S // BUCKET_S + 1
"""The bucket of now, and those that reach into the 24 hours before."""

_PACKED = struct.Struct(f"<q{BUCKETS}Q")


class WriteBudget:
    """Not thread-safe. ``now`` is wall-clock seconds; a clock set back by less than the window books into its latest bucket, one
    set back by more takes the whole history with it, so neither forgives what was written nor stops writing for good."""

    __slots__ = ("_buckets", "_latest", "_spent", "bytes_per_day")

    def __init__(self, bytes_per_day: int) -> None:
        if bytes_per_day < 0:
            raise ValueError(f"a budget of {bytes_per_day} bytes a day")
        self.bytes_per_day = bytes_per_day
        self._latest: int | None = None
        """Number of the latest bucket, counted from the epoch; bucket n is kept at ``n % BUCKETS``."""
        self._buckets = [0] * BUCKETS
        self._spent = 0

    def charge(self, count: int, now: float) -> None:
        """Book ``count`` bytes, whether or not they were left: who writes them asks :meth:`left` first."""
        if count < 0:
            raise ValueError(f"a charge of {count} bytes")
        self._advance(now)
        self._add(self._bucket(now), count)

    def correct(self, charged: int, written: int, charged_at: float, now: float) -> None:
        """``written`` bytes were really written of those ``charged`` at ``charged_at``. What was too much is given back where it
        was booked, what was too little is booked now."""
        self._advance(now)
        if written > charged:
            self._add(self._bucket(now), written - charged)
            return
        bucket = self._bucket(charged_at)
        if self._latest is not None and bucket > self._latest - BUCKETS:
            self._add(bucket, -min(charged - written, self._buckets[bucket % BUCKETS]))

    def spent(self, now: float) -> int:
        """Bytes booked in the 24 hours before ``now``, and at most five minutes more."""
        self._advance(now)
        return self._spent

    def left(self, now: float) -> int:
        return max(0, self.bytes_per_day - self.spent(now))

    def pack(self) -> bytes:
        """The history, for :meth:`restore` after a restart. The budget itself is not in it: it is a setting."""
        latest = -1 if self._latest is None else self._latest
        return _PACKED.pack(latest, *self._buckets)

    @classmethod
    def unpack(cls, packed: bytes, bytes_per_day: int) -> WriteBudget:
        """Raises SsdFormatError where ``packed`` is no history."""
        budget = cls(bytes_per_day)
        budget.restore(packed)
        return budget

    def restore(self, packed: bytes) -> None:
        """Take over a packed history; what both know of is counted once, at the higher of the two. Raises SsdFormatError."""
        if len(packed) != _PACKED.size:
            raise SsdFormatError(f"a packed write budget has {_PACKED.size} bytes, these are {len(packed)}")
        latest, *buckets = _PACKED.unpack(packed)
        if latest < 0:
            return
        own = latest if self._latest is None else self._latest
        newest = max(own, latest)
        merged = [0] * BUCKETS
        for known_until, kept in ((own, self._buckets), (latest, buckets)):
            for number in range(max(newest - BUCKETS, known_until - BUCKETS) + 1, known_until + 1):
                merged[number % BUCKETS] = max(merged[number % BUCKETS], kept[number % BUCKETS])
        self._latest, self._buckets, self._spent = newest, merged, sum(merged)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _bucket(self, now: float) -> int:
        """The bucket that ``now`` books into, never one after the latest."""
        number = int(now // BUCKET_S)
        return number if self._latest is None else min(number, self._latest)

    def _add(self, bucket: int, count: int) -> None:
        self._buckets[bucket % BUCKETS] += count
        self._spent += count

    def _advance(self, now: float) -> None:
        number = int(now // BUCKET_S)
        if self._latest is None:
            self._latest = number
            return
        if number < self._latest - BUCKETS:
            # The clock was wrong before or is now. Ages are kept, as of the latest booking.
            kept = [self._buckets[(self._latest - age) % BUCKETS] for age in range(BUCKETS)]
            for age, count in enumerate(kept):
                self._buckets[(number - age) % BUCKETS] = count
            self._latest = number
            return
        for gone in range(self._latest + 1, min(number, self._latest + BUCKETS) + 1):
            self._spent -= self._buckets[gone % BUCKETS]
            self._buckets[gone % BUCKETS] = 0
        self._latest = max(self._latest, number)
