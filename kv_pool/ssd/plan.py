"""How a chain would be written: which record into which segment, when batches leave, what it costs. Changes nothing. Pure.

:meth:`Planner.plan` answers with the reason why not, or with steps that ``writing.py`` carries out as they are. So asking and
doing can never differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.ssd.chains import Chains
from kv_pool.ssd.keytable import NONE
from kv_pool.ssd.records import (
    LENGTH_MAX,
    META_BYTES_MAX,
    PAGE,
    TOKENS_MAX,
    footer_pages,
    from_milliseconds,
    record_pages,
    to_milliseconds,
)
from kv_pool.ssd.segments import SPREAD_MAX, Segment, fits

LIFE_LEFT_MIN: Final = 0.5
"""Of a class's time to live: what has less left is written again when its chain is."""


class Refusal(Enum):
    """Why a chain is not written."""

    DOWN = "down"
    BAD_CHAIN = "bad_chain"
    """Candidates that do not follow each other, contradict what is here, follow themselves, or are beyond a limit."""
    TOO_LONG = "too_long"
    """It takes more batches than may be in flight, or a record does not fit a segment. A shorter piece from its root may do."""
    BUDGET = "budget"
    BUSY = "busy"
    NO_SEGMENT = "no_segment"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block in DRAM that may be written: its payload lies in ``slot``."""

    key: BlockKey
    parent: BlockKey | None
    slot: int
    tokens: int
    length: int
    checksum: int
    retention: int
    meta: bytes


@dataclass(slots=True, eq=False)
class Cursor:
    """An open segment as it would be; ``segment`` is None where it is yet to be opened. ``batch_bytes`` have not left yet, among
    them ``batch_records`` records."""

    retention: int
    segment: Segment | None
    next_page: int
    records: int
    earliest: float
    latest: float
    batch_bytes: int
    batch_records: int
    batches: int = 0


class StepKind(Enum):
    OPEN = "open"
    PUT = "put"
    SEND = "send"
    SEAL = "seal"
    CLOSE = "close"
    """As SEAL, but there is no room for a footer."""


@dataclass(frozen=True, slots=True)
class Step:
    kind: StepKind
    cursor: Cursor
    candidate: Candidate | None = None


@dataclass(slots=True)
class Plan:
    """``count_bytes`` is an upper bound, exact but for records that die before their footer is written."""

    steps: list[Step] = field(default_factory=list[Step])
    opens: int = 0
    batches: int = 0
    count_bytes: int = 0
    victims: list[Segment] = field(default_factory=list[Segment])


class Planner:
    """``ttl_s``: seconds to live, by retention."""

    def __init__(self, chains: Chains, ttl_s: Sequence[float], batch_bytes_max: int) -> None:
        self._chains = chains
        self._ttl_s = ttl_s
        self._batch_bytes_max = batch_bytes_max

    def expires_at(self, retention: int, now: float) -> float:
        """To the millisecond, as the medium has it."""
        return from_milliseconds(to_milliseconds(now + self._ttl_s[retention]))

    def bad(self, chain: Sequence[Candidate]) -> bool:
        """Whether a chain must not be written as it is."""
        index = self._chains.index
        before: Candidate | None = None
        keys, ghosts = set[BlockKey](), False
        for candidate in chain:
            if before is not None and candidate.parent != before.key:
                return True
            if candidate.key in keys or not self._within_limits(candidate):
                return True
            row = index.row(candidate.key)
            if row is not None and not self._chains.here(row):
                ghosts = True
            elif row is not None:
                above = index.parent(row)
                if (None if above == NONE else index.key(above)) != candidate.parent:
                    return True
            keys.add(candidate.key)
            before = candidate
        return self._loops(chain[0].parent, keys, ghosts=ghosts)

    def plan(self, chain: Sequence[Candidate], now: float, *, budget_left: int, room: int, batches_max: int) -> Plan | Refusal:
        """``room`` batches may be sent now, ``batches_max`` if none were in flight."""
        if not chain:
            return Plan()
        if self.bad(chain):
            return Refusal.BAD_CHAIN
        wanted = [candidate for candidate in chain if self._wanted(candidate, now)]
        if any(not fits(self._chains.segments.segment_pages, 1, 0, candidate.length) for candidate in wanted):
            return Refusal.TOO_LONG
        plan = _Planning(self._chains, self._batch_bytes_max, self._ttl_s).run(wanted, self, now)
        if plan.batches > batches_max:
            return Refusal.TOO_LONG
        if plan.count_bytes > budget_left:
            return Refusal.BUDGET
        if plan.batches > room:
            return Refusal.BUSY
        missing = plan.opens - self._chains.segments.free
        if missing > 0:
            victims = self._chains.segments.victims(missing, self._spared(chain), now)
            if victims is None:
                return Refusal.NO_SEGMENT
            plan.victims = victims
        return plan

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _within_limits(self, candidate: Candidate) -> bool:
        return (
            len(candidate.key) == KEY_BYTES
            and (candidate.parent is None or len(candidate.parent) == KEY_BYTES)
            and 0 <= candidate.length <= LENGTH_MAX
            and 0 <= candidate.tokens <= TOKENS_MAX
            and 0 <= candidate.retention < len(self._ttl_s)
            and len(candidate.meta) <= META_BYTES_MAX
        )

    def _loops(self, parent: BlockKey | None, keys: set[BlockKey], *, ghosts: bool) -> bool:
        """Whether one of ``keys``, which follow ``parent``, is what ``parent`` follows. Keys are digests of what they follow, so
        only a broken client can ask for this; but a loop could never be dropped."""
        if parent is None:
            return False
        if parent in keys:
            return True
        index = self._chains.index
        row = index.row(parent) if ghosts else None
        while row is not None and row != NONE:
            if index.key(row) in keys:
                return True
            row = index.parent(row)
        return False

    def _wanted(self, candidate: Candidate, now: float) -> bool:
        index = self._chains.index
        row = index.row(candidate.key)
        if row is None:
            return True
        if row in self._chains.pending:
            return False
        return not index.on_medium(row) or index.expires(row) - now < LIFE_LEFT_MIN * self._ttl_s[candidate.retention]

    def _spared(self, chain: Sequence[Candidate]) -> set[int]:
        """Segments that hold what the chain builds on."""
        index = self._chains.index
        rows = self._chains.ancestors(chain[0].parent)
        rows += [row for candidate in chain if (row := index.row(candidate.key)) is not None]
        return {index.segment(row) for row in rows if index.on_medium(row)}


class _Planning:
    """One plan in the making."""

    def __init__(self, chains: Chains, batch_bytes_max: int, ttl_s: Sequence[float]) -> None:
        self._chains = chains
        self._segments = chains.segments
        self._batch_bytes_max = batch_bytes_max
        self._ttl_s = ttl_s
        self._plan = Plan()
        self._cursors: dict[int, Cursor] = {}
        """Of segments that are open already, by id."""
        self._current: dict[int, Cursor] = {}
        """By retention."""
        self._sent_with: dict[BlockKey, tuple[Cursor, int]] = {}
        """Of what the plan has put: the cursor, and how many of its batches had left before."""

    def run(self, wanted: Sequence[Candidate], planner: Planner, now: float) -> Plan:
        for candidate in wanted:
            expires = planner.expires_at(candidate.retention, now)
            cursor = self._cursor_for(candidate, expires)
            self._send_parent(candidate.parent, cursor)
            size = record_pages(candidate.length) * PAGE
            if cursor.batch_records and cursor.batch_bytes + size > self._batch_bytes_max:
                self._send(cursor)
            self._sent_with[candidate.key] = (cursor, cursor.batches)
            self._plan.steps.append(Step(StepKind.PUT, cursor, candidate))
            self._plan.count_bytes += size
            cursor.next_page += size // PAGE
            cursor.records += 1
            cursor.earliest, cursor.latest = min(cursor.earliest, expires), max(cursor.latest, expires)
            cursor.batch_bytes += size
            cursor.batch_records += 1
            if cursor.batch_bytes >= self._batch_bytes_max:
                self._send(cursor)
        return self._plan

    def _cursor_for(self, candidate: Candidate, expires: float) -> Cursor:
        """Where the candidate goes; segments that must not take it are sealed."""
        retention = candidate.retention
        waiting = [self._cursor(segment) for segment in self._segments.open_for(retention)]
        cursor = self._current.get(retention)
        if cursor is not None and not self._closes(cursor, candidate, expires):
            return cursor
        if cursor is not None:
            self._seal(cursor)
            waiting = waiting[waiting.index(cursor) + 1 :] if cursor in waiting else []
        for cursor in waiting:
            if not self._closes(cursor, candidate, expires):
                break
            self._seal(cursor)
        else:
            cursor = Cursor(retention, None, 1, 0, math.inf, -math.inf, batch_bytes=PAGE, batch_records=0)
            self._plan.steps.append(Step(StepKind.OPEN, cursor))
            self._plan.opens += 1
            self._plan.count_bytes += PAGE
        assert cursor is not None
        self._current[retention] = cursor
        return cursor

    def _cursor(self, segment: Segment) -> Cursor:
        cursor = self._cursors.get(segment.id)
        if cursor is None:
            unsent = segment.unsent
            cursor = self._cursors[segment.id] = Cursor(
                segment.retention,
                segment,
                segment.next_page,
                len(segment.rows),
                segment.earliest,
                segment.latest,
                batch_bytes=unsent.count_bytes if unsent is not None else 0,
                batch_records=unsent.count if unsent is not None else 0,
            )
        return cursor

    def _closes(self, cursor: Cursor, candidate: Candidate, expires: float) -> bool:
        """Whether the segment is full for this record, or half full and its records would die too far apart."""
        pages = self._segments.segment_pages
        if not fits(pages, cursor.next_page, cursor.records, candidate.length):
            return True
        spread = max(cursor.latest, expires) - min(cursor.earliest, expires)
        return 2 * cursor.next_page >= pages and spread > SPREAD_MAX * self._ttl_s[candidate.retention]

    def _send_parent(self, parent: BlockKey | None, cursor: Cursor) -> None:
        """Batches count in the order in which they are sent: no record may be sent before its parent."""
        if parent is None:
            return
        put = self._sent_with.get(parent)
        if put is not None:
            above, batches = put
        else:
            row = self._chains.index.row(parent)
            item = None if row is None else self._chains.pending.get(row)
            if item is None or item.sent:
                return
            above, batches = self._cursor(self._segments.all[item.place.segment]), 0
        if above is not cursor and above.batches == batches:
            self._send(above)

    def _send(self, cursor: Cursor) -> None:
        self._plan.steps.append(Step(StepKind.SEND, cursor))
        self._left(cursor)

    def _seal(self, cursor: Cursor) -> None:
        """The footer travels with what has not been sent yet."""
        pages = self._segments.segment_pages
        if cursor.next_page + footer_pages(cursor.records) + 1 > pages:
            # Written by other rules than ours. It is only closed, and scanned after a restart.
            if cursor.batch_records:
                self._send(cursor)
            self._plan.steps.append(Step(StepKind.CLOSE, cursor))
            return
        self._plan.steps.append(Step(StepKind.SEAL, cursor))
        self._plan.count_bytes += (footer_pages(cursor.records) + 1) * PAGE
        self._left(cursor)

    def _left(self, cursor: Cursor) -> None:
        self._plan.batches += 1
        cursor.batches += 1
        cursor.batch_bytes = cursor.batch_records = 0
