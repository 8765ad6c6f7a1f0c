"""The SSD tier's log: what lies where, what is written next, what dies. :class:`SsdLog` is the only door. Pure.

It never touches a byte: it hands out batches to write, is told what came of them, and knows where a block may be read. Nobody has
to wait for it: a chain that cannot be written now is refused with a reason.

Always true (``check``):

- **Prefix-closed**: no record is here whose parent was here with it and is neither on the medium nor in DRAM any more. A record
that was written without its parent
  on the medium says so (``Record.first``), and is kept after a restart without it; any other one is not.
- Nothing is found before all it follows is on the medium, nor after its expiry.
- In a segment lies one retention, with expiries close together. It dies whole; nothing is copied to make room.
- What is written is booked at once and exactly, and never exceeds the budget of 24 hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kv_pool.keys import BlockKey
from kv_pool.policy.segments import SegmentPolicy
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.chains import Chains
from kv_pool.ssd.plan import Candidate, Plan, Planner, Refusal
from kv_pool.ssd.records import PAGE, RETENTIONS_MAX, Place, RecoveredSegment, WriteBatch
from kv_pool.ssd.recovery import last_expiry, worth_having
from kv_pool.ssd.segments import Segments, SegmentState, fits
from kv_pool.ssd.writing import Writing, Written

BUDGET_UNPACKED_MIN: Final = 1024 * 1024
BUDGET_UNPACKED_SHARE: Final = 200
"""Of the budget of a day, one part in so many may go unrecorded by a crash."""


class Missing(Enum):
    ABSENT = "absent"
    EXPIRED = "expired"


Found = Place | Missing

Stored = tuple[BlockKey, BlockKey | None, int]
"""Key, parent, tokens."""


class Lost(NamedTuple):
    """``dropped`` were on the medium; ``failed`` had not been given to the disk yet, so their slots are free to go."""

    dropped: list[BlockKey]
    failed: list[BlockKey]


@dataclass(frozen=True, slots=True)
class SsdLogStats:
    """Bytes on the medium count whole pages, headers among them. ``segments`` by state; ``retentions`` are segments in use, by
    retention. ``write_amplification`` is bytes written to bytes of payload admitted; None before anything was."""

    up: bool
    records: int
    live_bytes: int
    dead_bytes: int
    segments: dict[SegmentState, int]
    retentions: dict[int, int]
    evicted_segments: int
    batches_in_flight: int
    budget_bytes: int
    budget_spent: int
    budget_left: int
    bytes_written: int
    bytes_admitted: int
    records_rewritten: int
    write_amplification: float | None


class SsdLog:
    """Not thread-safe; one owner. ``now`` is wall-clock seconds everywhere. Down until the first :meth:`recover`.

    ``resident`` says whether the node has a block in DRAM. ``ttl_s`` are seconds to live by retention. A batch is sent at
    ``batch_bytes_max`` bytes, or by :meth:`flush`. Raises ValueError for settings that make no sense.
    """

    def __init__(
        self,
        *,
        segments: int,
        segment_pages: int,
        ttl_s: Sequence[float],
        budget: WriteBudget,
        batches_in_flight_max: int,
        batch_bytes_max: int,
        policy: SegmentPolicy,
        resident: Callable[[BlockKey], bool] = lambda _: False,
    ) -> None:
        if segments < 1 or not fits(segment_pages, 1, 0, 1):
            raise ValueError(f"{segments} segments of {segment_pages} pages hold nothing")
        if not 1 <= len(ttl_s) <= RETENTIONS_MAX or any(ttl <= 0 for ttl in ttl_s):
            raise ValueError(f"1 to {RETENTIONS_MAX} retentions with a positive time to live are needed, not {list(ttl_s)}")
        if batches_in_flight_max < 1 or batch_bytes_max < 1:
            raise ValueError(f"{batches_in_flight_max} batches of {batch_bytes_max} bytes")
        self._ttl_s = tuple(ttl_s)
        self._budget = budget
        self._batches_max = batches_in_flight_max
        self._segments = Segments(segments, segment_pages, policy)
        self._chains = Chains(self._segments, resident)
        self._planner = Planner(self._chains, self._ttl_s, batch_bytes_max)
        self._writing = Writing(self._chains, budget, self._planner)
        self._up = False
        self.budget_packed_at = 0

    # --- looking ----------------------------------------------------------------------------------------------------------------

    def find(self, key: BlockKey, now: float) -> Found:
        """Where a block may be read. O(1)."""
        index = self._chains.index
        row = index.row(key)
        if row is None or not index.on_medium(row):
            return Missing.ABSENT
        return Missing.EXPIRED if index.expires(row) <= now else self._place(row)

    def holds(self, key: BlockKey) -> bool:
        """Whether a record of ``key`` is on the medium, expired or not."""
        row = self._chains.index.row(key)
        return row is not None and self._chains.index.on_medium(row)

    def pending(self, key: BlockKey) -> bool:
        """Whether a record of ``key`` is on its way."""
        row = self._chains.index.row(key)
        return row is not None and row in self._chains.pending

    def wants(self, key: BlockKey, retention: int, now: float) -> bool:
        """Whether :meth:`write` would not skip ``key``: it is neither on its way, nor here with enough of its time left."""
        return self._planner.wants(key, retention, now)

    def __len__(self) -> int:
        """Records on the medium."""
        return self._chains.index.stored

    def keys(self) -> list[BlockKey]:
        """Of all records on the medium, parents before children."""
        return self._chains.keys()

    def touch(self, key: BlockKey, now: float) -> None:
        """A hit: the segment was useful. Unknown keys are ignored."""
        row = self._chains.index.row(key)
        if row is not None and self._chains.index.on_medium(row):
            segment = self._segments.all[self._chains.index.segment(row)]
            segment.touched = max(segment.touched, now)

    def begin_read(self, key: BlockKey) -> Place:
        """From now until :meth:`end_read` the segment is not used again, whatever leaves the index. Raises KeyError."""
        row = self._chains.index.row(key)
        if row is None or not self._chains.index.on_medium(row):
            raise KeyError(key)
        place = self._place(row)
        self._segments.all[place.segment].readers += 1
        return place

    def end_read(self, place: Place) -> None:
        """Once for each :meth:`begin_read`, also when the disk has gone meanwhile. Raises KeyError."""
        segment = self._segments.all[place.segment]
        if not segment.readers:
            raise KeyError(place)
        segment.readers -= 1
        self._segments.settle(segment)

    # --- writing ----------------------------------------------------------------------------------------------------------------

    def refusal(self, chain: Sequence[Candidate], now: float) -> Refusal | None:
        """Why :meth:`write` would write nothing of ``chain`` now; None where it would, or where nothing of it needs to be."""
        plan = self._plan(chain, now)
        return plan if isinstance(plan, Refusal) else None

    def write(self, chain: Sequence[Candidate], now: float) -> tuple[list[WriteBatch], list[BlockKey]]:
        """Write a chain, root first, all of it or nothing: what :meth:`refusal` refuses does nothing. Skipped is what is on its
        way, or here with at least half of its class's time left. Everything else needs its slot until :meth:`written` has named
        its key (or :meth:`down`, as failed).

        Returns the batches to be written now (the rest waits for more, or for :meth:`flush`), and the keys that left the medium
        because their segment was needed.
        """
        plan = self._plan(chain, now)
        return ([], []) if isinstance(plan, Refusal) else self._writing.carry_out(plan, now)

    def flush(self, now: float) -> list[WriteBatch]:
        """Send what waits for more, as far as batches may be in flight. To be called again after :meth:`written`."""
        return self._writing.flush(self._batches_max - self._writing.in_flight) if self._up else []

    def written(self, batch: int, ok: bool, bytes_written: int, now: float) -> Written:
        """The disk's answer. Batches take effect in the order in which they were sent, so this may be about earlier ones, or
        about none yet. Raises KeyError for a batch that is not in flight."""
        return self._writing.answered(batch, ok, bytes_written, now)

    # --- leaving ----------------------------------------------------------------------------------------------------------------

    def drop(self, key: BlockKey) -> list[BlockKey]:
        """``key`` (unreadable, say) and all that follow it leave the index. Returns them, parents before children."""
        row = self._chains.index.row(key)
        return self._chains.drop(row) if row is not None and self._chains.index.on_medium(row) else []

    def left_dram(self, key: BlockKey) -> list[BlockKey]:
        """A block is not resident any more. Returns what leaves the medium because nothing that it followed is left."""
        return self._chains.left_dram(key)

    def expire(self, now: float) -> list[BlockKey]:
        """Segments past their last expiry die whole. Returns the keys that left with them, and what followed these."""
        gone: list[BlockKey] = []
        for segment in self._segments.expired(now):
            gone += self._chains.kill(segment)
        return gone

    # --- the disk comes and goes --------------------------------------------------------------------------------------------

    def recover(self, segments: Iterable[RecoveredSegment], now: float) -> list[Stored]:
        """The disk is there, with this on it. Returns what is here now, parents first. Raises ValueError for segments that cannot
        be, or if the disk was there already."""
        found = list(segments)
        if self._up:
            raise ValueError("recovered twice without going down")
        if len({segment.id for segment in found}) != len(found) or not all(
            0 <= segment.id < len(self._segments.all) for segment in found
        ):
            raise ValueError("recovered segments have impossible numbers")
        alive: list[RecoveredSegment] = []
        for segment in found:
            ends = last_expiry(segment)
            if ends is None or ends <= now:
                self._segments.generation_seen(segment)
                continue
            known = segment.retention < len(self._ttl_s)
            touched = min(now, ends - self._ttl_s[segment.retention]) if known else now
            self._segments.recovered(segment, writable=known, touched=touched)
            alive.append(segment)
        stored: list[Stored] = []
        for record in worth_having(alive):
            entry, segment = record.entry, self._segments.all[record.segment.id]
            row = self._chains.index.ensure(entry.key, entry.parent)
            self._chains.index.place(
                row,
                segment=segment.id,
                page=entry.page,
                length=entry.length,
                tokens=entry.tokens,
                first=entry.first,
                expires=entry.expires_at,
            )
            self._segments.found_record(segment, row, entry.length, entry.expires_at)
            stored.append((entry.key, entry.parent, entry.tokens))
        self._up = True
        return stored

    def down(self, now: float) -> Lost:
        """The disk is gone: everything leaves the index. Batches in flight are still answered, and fail."""
        dropped = self.keys()
        failed = self._writing.forget(now)
        self._chains.forget()
        self._up = False
        return Lost(dropped, failed)

    def restore_budget(self, packed: bytes) -> None:
        """What an earlier process wrote counts too. Raises SsdFormatError where ``packed`` is no history."""
        self._budget.restore(packed)

    @property
    def bytes_written(self) -> int:
        """All that was written, by this process."""
        return self._writing.bytes_written

    def pack_budget(self, now: float) -> bytes:
        """The history to keep; writing it down is booked as well."""
        self._budget.charge(PAGE, now)
        self._writing.bytes_written += PAGE
        self.budget_packed_at = self._writing.bytes_written
        return self._budget.pack()

    @property
    def budget_is_stale(self) -> bool:
        """So much was written since the history was packed that a crash now would forgive too much."""
        unpacked = self._writing.bytes_written - self.budget_packed_at
        return unpacked > max(BUDGET_UNPACKED_MIN, self._budget.bytes_per_day // BUDGET_UNPACKED_SHARE)

    # --- telling ----------------------------------------------------------------------------------------------------------------

    def stats(self, now: float) -> SsdLogStats:
        states = dict.fromkeys(SegmentState, 0)
        retentions = dict.fromkeys(range(len(self._ttl_s)), 0)
        live = used = 0
        for segment in self._segments.all:
            states[segment.state] += 1
            if segment.state in (SegmentState.OPEN, SegmentState.SEALED):
                retentions[segment.retention] = retentions.get(segment.retention, 0) + 1
                live += segment.live_bytes
                used += max(0, segment.used_bytes - PAGE)
        admitted = self._writing.bytes_admitted
        return SsdLogStats(
            up=self._up,
            records=len(self),
            live_bytes=live,
            dead_bytes=max(0, used - live),
            segments=states,
            retentions=retentions,
            evicted_segments=self._segments.evicted,
            batches_in_flight=self._writing.in_flight,
            budget_bytes=self._budget.bytes_per_day,
            budget_spent=self._budget.spent(now),
            budget_left=self._budget.left(now),
            bytes_written=self._writing.bytes_written,
            bytes_admitted=admitted,
            records_rewritten=self._writing.records_rewritten,
            write_amplification=self._writing.bytes_written / admitted if admitted else None,
        )

    def check(self) -> None:
        """For tests: assert that all tables tell the same, and that no record is here without its parent."""
        self._chains.check()

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _place(self, row: int) -> Place:
        index = self._chains.index
        segment = index.segment(row)
        return Place(segment, self._segments.all[segment].generation, index.page(row), index.length(row))

    def _plan(self, chain: Sequence[Candidate], now: float) -> Plan | Refusal:
        if not self._up:
            return Refusal.DOWN
        return self._planner.plan(
            chain,
            now,
            budget_left=self._budget.left(now),
            room=self._batches_max - self._writing.in_flight,
            batches_max=self._batches_max,
        )
