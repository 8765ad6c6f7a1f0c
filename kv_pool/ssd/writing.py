"""Carries out plans, keeps the batches, and settles them in the order in which they were sent. Pure.

A batch takes effect only when all earlier ones have been answered. So a record is never found before what it follows, and after a
crash at any moment everything that was ever found is found again. What follows a failed batch in its segment counts as failed
too: a scan of that segment ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_pool.keys import BlockKey
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.chains import Chains, Item
from kv_pool.ssd.plan import Candidate, Cursor, Plan, Planner, StepKind
from kv_pool.ssd.records import (
    PAGE,
    Footer,
    Record,
    WriteBatch,
    WriteRecord,
    batch_bytes,
    from_milliseconds,
    record_pages,
    to_milliseconds,
)
from kv_pool.ssd.segments import Segment


@dataclass(slots=True, eq=False)
class Filling:
    """A batch that has not been sent yet. ``charged_at`` is when its first bytes were booked."""

    segment: Segment
    opens: bool
    charged_at: float
    items: list[Item] = field(default_factory=list[Item])
    count_bytes: int = 0

    @property
    def count(self) -> int:
        return len(self.items)


@dataclass(slots=True, eq=False)
class Sent:
    """A batch in flight. ``void`` once the disk has gone: its segment is another one by now."""

    segment: Segment
    items: list[Item]
    charged: int
    charged_at: float
    void: bool = False
    answer: bool | None = None
    bytes_written: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """What came of batches. Every key that was to be written is once in ``stored`` (with parent and tokens, parents first) or in
    ``failed``: from then on its slot is free to go. ``dropped`` are keys that were on the medium and are not any more."""

    stored: list[tuple[BlockKey, BlockKey | None, int]] = field(default_factory=list[tuple[BlockKey, BlockKey | None, int]])
    failed: list[BlockKey] = field(default_factory=list[BlockKey])
    dropped: list[BlockKey] = field(default_factory=list[BlockKey])


class Writing:
    """Owns the batches."""

    def __init__(self, chains: Chains, budget: WriteBudget, planner: Planner) -> None:
        self._chains = chains
        self._segments = chains.segments
        self._budget = budget
        self._planner = planner
        self._filling: dict[int, Filling] = {}
        """By segment, in the order in which they were begun."""
        self._sent: dict[int, Sent] = {}
        """By id, in the order in which they were sent."""
        self._last_id = 0
        self.bytes_written = 0
        self.bytes_admitted = 0
        self.records_rewritten = 0

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    def carry_out(self, plan: Plan, now: float) -> tuple[list[WriteBatch], list[BlockKey]]:
        """Returns the batches that are to be written now, and the keys that had to leave the medium for this."""
        dropped: list[BlockKey] = []
        for victim in plan.victims:
            self._segments.evicted += 1
            dropped += self._chains.kill(victim)
        batches: list[WriteBatch] = []
        opened: dict[Cursor, Segment] = {}
        for step in plan.steps:
            if step.kind is StepKind.OPEN:
                opened[step.cursor] = self._open(step.cursor.retention, now)
                continue
            segment = step.cursor.segment or opened[step.cursor]
            if step.kind is StepKind.PUT:
                assert step.candidate is not None
                self._put(segment, step.candidate, now)
            elif step.kind is StepKind.SEND:
                batches.append(self._send(self._filling[segment.id], None))
            elif step.kind is StepKind.SEAL:
                batches.append(self._seal(segment, now))
            else:
                self._segments.seal(segment, now)
        return batches, dropped

    def flush(self, room: int) -> list[WriteBatch]:
        """Send what is filling, but no more than ``room`` batches."""
        return [self._send(filling, None) for filling in list(self._filling.values())[: max(0, room)]]

    def answered(self, batch: int, ok: bool, bytes_written: int, now: float) -> Written:
        """Raises KeyError for a batch that is not in flight."""
        sent = self._sent[batch]
        if sent.answer is not None:
            raise KeyError(batch)
        sent.answer, sent.bytes_written = ok, bytes_written
        self.bytes_written += bytes_written
        self._budget.correct(sent.charged, bytes_written, sent.charged_at, now)
        result = Written()
        while self._sent:
            first = next(iter(self._sent))
            if self._sent[first].answer is None:
                break
            self._settle(self._sent.pop(first), now, result)
        return result

    def forget(self, now: float) -> list[BlockKey]:
        """The disk is gone. Returns the keys that had not been sent; those in flight are still answered."""
        failed: list[BlockKey] = []
        for filling in list(self._filling.values()):
            failed += [item.record.key for item in filling.items]
            self._discard(filling, now)
        for sent in self._sent.values():
            sent.void = True
        return failed

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _open(self, retention: int, now: float) -> Segment:
        segment = self._segments.open(retention)
        self._begin(segment, now, opens=True)
        return segment

    def _begin(self, segment: Segment, now: float, *, opens: bool) -> Filling:
        filling = self._filling[segment.id] = Filling(segment, opens, now)
        segment.unsent = filling
        segment.writers += 1
        if opens:
            self._charge(filling, PAGE, now)
        return filling

    def _charge(self, filling: Filling, count: int, now: float) -> None:
        filling.count_bytes += count
        self._budget.charge(count, now)

    def _put(self, segment: Segment, candidate: Candidate, now: float) -> None:
        chains = self._chains
        filling = self._filling.get(segment.id) or self._begin(segment, now, opens=False)
        above = None if candidate.parent is None else chains.index.row(candidate.parent)
        record = Record(
            key=candidate.key,
            parent=candidate.parent,
            first=above is None or not chains.here(above),
            tokens=candidate.tokens,
            length=candidate.length,
            checksum=candidate.checksum,
            retention=candidate.retention,
            written_at=from_milliseconds(to_milliseconds(now)),
            expires_at=self._planner.expires_at(candidate.retention, now),
            meta=candidate.meta,
        )
        row = chains.index.ensure(candidate.key, candidate.parent)
        replaced = None
        if chains.index.on_medium(row):
            replaced = self._segments.all[chains.index.segment(row)]
            replaced.writers += 1
            self.records_rewritten += 1
        else:
            self.bytes_admitted += candidate.length
        place = self._segments.append(segment, row, candidate.length, record.expires_at)
        item = chains.pending[row] = Item(row, place, record, candidate.slot, replaced)
        filling.items.append(item)
        self._charge(filling, record_pages(candidate.length) * PAGE, now)

    def _seal(self, segment: Segment, now: float) -> WriteBatch:
        entries = self._chains.footer_entries(segment)
        filling = self._filling.get(segment.id) or self._begin(segment, now, opens=False)
        batch = self._send(filling, Footer(segment.next_page, entries))
        self._budget.charge(batch_bytes(batch) - filling.count_bytes, now)
        self._segments.seal(segment, now)
        return batch

    def _send(self, filling: Filling, footer: Footer | None) -> WriteBatch:
        segment = filling.segment
        del self._filling[segment.id]
        segment.unsent = None
        self._last_id += 1
        for item in filling.items:
            item.sent = True
        batch = WriteBatch(
            id=self._last_id,
            segment=segment.id,
            generation=segment.generation,
            opens=filling.opens,
            retention=segment.retention,
            records=tuple(WriteRecord(item.place, item.record, item.slot) for item in filling.items),
            footer=footer,
        )
        self._sent[batch.id] = Sent(segment, filling.items, batch_bytes(batch), filling.charged_at)
        return batch

    def _settle(self, sent: Sent, now: float, result: Written) -> None:
        segment = sent.segment
        if sent.answer and not sent.void and not segment.broken:
            for item in sent.items:
                if item.doomed:
                    result.failed.append(item.record.key)
                else:
                    self._chains.stored(item)
                    result.stored.append((item.record.key, item.record.parent, item.record.tokens))
        else:
            self._fail(sent.items, result)
            if not sent.void:
                self._segments.seal(segment, now, broken=True)
                filling = self._filling.get(segment.id)
                if filling is not None:
                    self._fail(filling.items, result)
                    self._discard(filling, now)
        self._release(segment, sent.items)

    def _fail(self, items: list[Item], result: Written) -> None:
        for item in items:
            result.failed.append(item.record.key)
            result.dropped.extend(self._chains.failed(item))

    def _discard(self, filling: Filling, now: float) -> None:
        del self._filling[filling.segment.id]
        filling.segment.unsent = None
        self._budget.correct(filling.count_bytes, 0, filling.charged_at, now)
        self._release(filling.segment, filling.items)

    def _release(self, segment: Segment, items: list[Item]) -> None:
        touched = {segment, *(item.replaced for item in items if item.replaced is not None)}
        segment.writers -= 1
        for item in items:
            if item.replaced is not None:
                item.replaced.writers -= 1
        for each in sorted(touched, key=lambda each: each.id):
            self._segments.settle(each)
