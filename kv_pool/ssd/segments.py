"""Life of the segments: which is written to, which is full, which may die. Pure.

::

    free --open(generation + 1)--> open --seal--> sealed --kill--> free
                                     |                    '-- while somebody reads: dying --last reader--> free
                                     '-- a batch failed: sealed without a footer, never written to again

A segment holds records of one retention whose expiries lie close together, so it dies whole and is used again in place: nothing
is ever copied to make room.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from kv_pool.policy.segments import SegmentFacts, SegmentPolicy
from kv_pool.ssd.records import PAGE, Place, RecoveredSegment, footer_pages, record_pages

SPREAD_MAX: Final = 0.25
"""Of a class's time to live: how far apart the expiries in one segment may lie, once it is half full."""


class SegmentState(Enum):
    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"
    DYING = "dying"


def _rows() -> array[int]:
    return array("I")


@dataclass(slots=True, eq=False)
class Segment:
    """``readers`` read a record of it; ``writers`` are batches that write to it or replace a record of it."""

    id: int
    state: SegmentState = SegmentState.FREE
    generation: int = 0
    generation_next: int = 1
    retention: int = 0
    next_page: int = 0
    rows: array[int] = field(default_factory=_rows)
    """Rows of the index, of all that was written here; one that lies elsewhere by now is dead here."""
    live_bytes: int = 0
    earliest: float = math.inf
    latest: float = -math.inf
    """First and last expiry of what was written here."""
    touched: float = -math.inf
    readers: int = 0
    writers: int = 0
    unsent: Unsent | None = None
    """The batch that is filling."""
    broken: bool = False
    """A batch failed: what lies behind it would not be found by a scan, so nothing more comes here."""

    @property
    def idle(self) -> bool:
        return not self.readers and not self.writers

    @property
    def used_bytes(self) -> int:
        return self.next_page * PAGE


def fits(segment_pages: int, next_page: int, records: int, length: int) -> bool:
    """Whether one more record fits behind ``records`` others, with room left for the footer of them all."""
    return next_page + record_pages(length) + footer_pages(records + 1) + 1 <= segment_pages


class Unsent(Protocol):
    """A batch that is filling, as far as planning needs it."""

    @property
    def count(self) -> int:
        """Records in it."""
        ...

    @property
    def count_bytes(self) -> int:
        """What writing it as it is would take."""
        ...


class Segments:
    """Owns all segments."""

    def __init__(self, count: int, segment_pages: int, policy: SegmentPolicy) -> None:
        self.all = [Segment(number) for number in range(count)]
        self.segment_pages = segment_pages
        self.evicted = 0
        """Segments that died before their time, because room was needed."""
        self._policy = policy
        self._free: deque[int] = deque(range(count))
        self._open: dict[int, list[Segment]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def open_for(self, retention: int) -> Sequence[Segment]:
        """The open segments of a class, in the order in which they are to be filled: one, or more after a crash."""
        return self._open.get(retention, ())

    def open(self, retention: int) -> Segment:
        """Take the segment that has been free longest into use, as a new generation. There must be one."""
        segment = self.all[self._free.popleft()]
        segment.state = SegmentState.OPEN
        segment.generation = segment.generation_next
        segment.generation_next += 1
        segment.retention = retention
        segment.next_page = 1
        self._open.setdefault(retention, []).append(segment)
        return segment

    def append(self, segment: Segment, row: int, length: int, expires: float) -> Place:
        """Room for one more record behind the last."""
        place = Place(segment.id, segment.generation, segment.next_page, length)
        segment.next_page += record_pages(length)
        segment.live_bytes += record_pages(length) * PAGE
        segment.rows.append(row)
        segment.earliest = min(segment.earliest, expires)
        segment.latest = max(segment.latest, expires)
        return place

    def deaden(self, segment: int, length: int) -> None:
        """A record of ``length`` bytes is not worth finding there any more."""
        self.all[segment].live_bytes -= record_pages(length) * PAGE

    def seal(self, segment: Segment, now: float, *, broken: bool = False) -> None:
        """Nothing is added any more."""
        if segment.state is SegmentState.OPEN:
            self._open[segment.retention].remove(segment)
            segment.state = SegmentState.SEALED
        segment.touched = max(segment.touched, now)
        segment.broken = segment.broken or broken

    def kill(self, segment: Segment) -> None:
        """All of it is void. It is free, or will be once the last reader (or a writer from before the disk failed) is done."""
        if segment.state is SegmentState.OPEN:
            self._open[segment.retention].remove(segment)
        segment.state = SegmentState.DYING
        segment.rows = _rows()
        segment.live_bytes = segment.next_page = 0
        segment.earliest, segment.latest, segment.touched = math.inf, -math.inf, -math.inf
        segment.broken = False
        self.settle(segment)

    def settle(self, segment: Segment) -> None:
        """To be called when a reader or a writer is done."""
        if not segment.idle:
            return
        if segment.state is SegmentState.DYING:
            segment.state = SegmentState.FREE
            self._free.append(segment.id)
        elif segment.broken and not segment.live_bytes:
            self.kill(segment)

    def victims(self, count: int, spared: AbstractSet[int], now: float) -> list[Segment] | None:
        """``count`` sealed segments that may die, as the policy has it; None where there are not enough. ``spared`` must stay."""
        facts = {
            segment.id: SegmentFacts(
                segment.id,
                segment.retention,
                segment.live_bytes,
                segment.used_bytes,
                segment.latest,
                segment.touched,
            )
            for segment in self.all
            if segment.state is SegmentState.SEALED and segment.idle and segment.id not in spared
        }
        found: list[Segment] = []
        while len(found) < count:
            chosen = self._policy.victim(tuple(facts.values()), now) if facts else None
            if chosen is None:
                return None
            del facts[chosen]
            found.append(self.all[chosen])
        return found

    def expired(self, now: float) -> list[Segment]:
        """Those whose last record has expired, but for those that something is being written to."""
        used = (SegmentState.OPEN, SegmentState.SEALED)
        return [s for s in self.all if s.state in used and s.latest <= now and not s.writers]

    # --- the disk goes and comes ------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The disk is gone: all segments are void."""
        for segment in self.all:
            if segment.state in (SegmentState.OPEN, SegmentState.SEALED):
                self.kill(segment)

    def recovered(self, found: RecoveredSegment, *, writable: bool, touched: float) -> Segment:
        """Take over what was found in a segment that is void here; the caller fills it with :meth:`found_record`."""
        segment = self.all[found.id]
        assert segment.state in (SegmentState.FREE, SegmentState.DYING)
        if segment.state is SegmentState.FREE:
            self._free.remove(segment.id)
        segment.generation = found.generation
        segment.generation_next = max(segment.generation_next, found.generation + 1)
        segment.retention = found.retention
        segment.next_page = max(1, found.used_pages)
        segment.touched = touched
        if found.sealed or not writable or segment.writers:
            segment.state = SegmentState.SEALED
        else:
            segment.state = SegmentState.OPEN
            self._open.setdefault(found.retention, []).append(segment)
        return segment

    def found_record(self, segment: Segment, row: int, length: int, expires: float) -> None:
        segment.rows.append(row)
        segment.live_bytes += record_pages(length) * PAGE
        segment.earliest = min(segment.earliest, expires)
        segment.latest = max(segment.latest, expires)

    def generation_seen(self, found: RecoveredSegment) -> None:
        """Nothing in a segment is worth keeping but the number of its generation."""
        segment = self.all[found.id]
        segment.generation_next = max(segment.generation_next, found.generation + 1)
