"""A dumb twin of the SSD log, and a medium that keeps what batches wrote: lists and dicts, nothing clever."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_pool.keys import BlockKey
from kv_pool.ssd.plan import Candidate
from kv_pool.ssd.records import FooterEntry, RecoveredSegment, WriteBatch, WriteRecord, record_pages


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def entry_of(write: WriteRecord) -> FooterEntry:
    record = write.record
    return FooterEntry(record.key, record.parent, record.first, write.place.page, record.length, record.tokens, record.expires_at)


@dataclass
class MediumSegment:
    """What lies in a segment file; every part remembers the generation that wrote it."""

    generation: int = 0
    retention: int = 0
    pages: dict[int, tuple[int, FooterEntry]] = field(default_factory=dict)
    trailer: tuple[int, tuple[FooterEntry, ...]] = (0, ())
    next_page: int = 1
    """Where the next batch must begin."""


class Medium:
    """What a restart would find. Batches arrive in any order, and in part."""

    def __init__(self) -> None:
        self.segments: dict[int, MediumSegment] = {}

    def sent(self, batch: WriteBatch) -> None:
        """Records lie one behind the other, behind the batch before, and in front of the footer."""
        segment = self.segments.setdefault(batch.segment, MediumSegment())
        if batch.opens:
            segment.next_page = 1
        for write in batch.records:
            assert write.place.page == segment.next_page
            assert (write.place.segment, write.place.generation) == (batch.segment, batch.generation)
            segment.next_page += record_pages(write.record.length)
        if batch.footer is not None:
            assert batch.footer.page == segment.next_page
            segment.next_page = 1 << 30

    def apply(self, batch: WriteBatch, records: int, *, header: bool = True, whole: bool = True) -> None:
        """The first ``records`` of the batch got there, and its footer if it is ``whole``."""
        segment = self.segments[batch.segment]
        if batch.opens and header:
            segment.generation, segment.retention = batch.generation, batch.retention
        for write in batch.records[:records]:
            segment.pages[write.place.page] = (batch.generation, entry_of(write))
        if batch.footer is not None and whole:
            segment.trailer = (batch.generation, batch.footer.entries)

    def recovered(self) -> list[RecoveredSegment]:
        found: list[RecoveredSegment] = []
        for number, segment in self.segments.items():
            if not segment.generation:
                continue
            sealed = segment.trailer[0] == segment.generation
            entries = list(segment.trailer[1]) if sealed else []
            page = 1
            while not sealed and page in segment.pages and segment.pages[page][0] == segment.generation:
                entries.append(segment.pages[page][1])
                page += record_pages(entries[-1].length)
            segment.next_page = 1 << 30 if sealed else page
            found.append(RecoveredSegment(number, segment.generation, segment.retention, sealed, page, tuple(entries)))
        return found


@dataclass(eq=False)
class Writing:
    candidate: Candidate
    first: bool
    expires: float
    doomed: bool = False
    place: tuple[int, int, int] | None = None
    """Segment, generation, page; known once sent."""
    replaces: int | None = None
    """The segment where an older record lies meanwhile."""

    @property
    def key(self) -> BlockKey:
        return self.candidate.key


@dataclass
class OnMedium:
    parent: BlockKey | None
    first: bool
    expires: float
    place: tuple[int, int, int]


@dataclass(eq=False)
class Flight:
    batch: WriteBatch
    writings: list[Writing]
    void: bool = False
    answer: bool | None = None


class Twin:
    def __init__(self, ttl: list[float]) -> None:
        self.ttl = ttl
        self.stored: dict[BlockKey, OnMedium] = {}
        self.unsent: list[Writing] = []
        self.flights: list[Flight] = []
        self.broken: set[tuple[int, int]] = set()
        self.latest: dict[int, float] = {}
        """Last expiry of what was ever sent to a segment in its generation."""

    # --- what is there ----------------------------------------------------------------------------------------------------------

    def underway(self) -> list[Writing]:
        flying = [w for flight in self.flights if not flight.void for w in flight.writings]
        return [w for w in flying + self.unsent if not w.doomed]

    def here(self, key: BlockKey | None) -> bool:
        return key in self.stored or any(w.key == key for w in self.underway())

    def closure(self, keys: set[BlockKey]) -> set[BlockKey]:
        """The keys on the medium among these and all that follow them."""
        gone = {key for key in keys if key in self.stored}
        while True:
            more = {key for key, record in self.stored.items() if record.parent in gone and key not in gone}
            if not more:
                return gone
            gone |= more

    # --- what happens -----------------------------------------------------------------------------------------------------------

    def wanted(self, chain: list[Candidate], now: float) -> list[Candidate]:
        waiting = {w.key for w in self.underway()}
        result: list[Candidate] = []
        for candidate in chain:
            record = self.stored.get(candidate.key)
            fresh = record is not None and record.expires - now >= self.ttl[candidate.retention] / 2
            if candidate.key not in waiting and not fresh:
                result.append(candidate)
        return result

    def write(self, wanted: list[Candidate], now: float) -> None:
        for candidate in wanted:
            record = self.stored.get(candidate.key)
            self.unsent.append(
                Writing(
                    candidate,
                    first=not self.here(candidate.parent),
                    expires=round((now + self.ttl[candidate.retention]) * 1000) / 1000,
                    replaces=record.place[0] if record else None,
                )
            )

    def sent(self, batch: WriteBatch) -> None:
        writings: list[Writing] = []
        for write in batch.records:
            (writing,) = [w for w in self.unsent if w.candidate.slot == write.slot]
            assert (write.record.key, write.record.parent) == (writing.key, writing.candidate.parent)
            assert (write.record.first, write.record.expires_at) == (writing.first, writing.expires)
            self.unsent.remove(writing)
            writing.place = (write.place.segment, write.place.generation, write.place.page)
            writings.append(writing)
        if batch.opens:
            self.latest[batch.segment] = 0.0
        for writing in writings:
            self.latest[batch.segment] = max(self.latest[batch.segment], writing.expires)
        self.flights.append(Flight(batch, writings))

    def drop(self, key: BlockKey) -> set[BlockKey]:
        """What follows a key that was on the medium goes; what follows one that never was stays if it was written alone."""
        gone: set[BlockKey] = set()
        was_here = key in self.stored
        if was_here:
            gone.add(key)
            del self.stored[key]
        for writing in self.underway():
            if writing.key == key:
                writing.doomed = True
        for child, record in list(self.stored.items()):
            if record.parent == key and child in self.stored and (was_here or not record.first):
                gone |= self.drop(child)
        for writing in self.underway():
            if writing.candidate.parent == key and not writing.doomed and (was_here or not writing.first):
                if writing.key in self.stored:
                    writing.doomed = True
                else:
                    gone |= self.drop(writing.key)
        return gone

    def drop_all(self, keys: set[BlockKey]) -> None:
        for key in keys:
            if key in self.stored:
                self.drop(key)

    def settle(self) -> tuple[set[BlockKey], list[BlockKey], set[BlockKey]]:
        """Stored, failed, dropped."""
        stored: set[BlockKey] = set()
        failed: list[BlockKey] = []
        dropped: set[BlockKey] = set()
        while self.flights and self.flights[0].answer is not None:
            flight = self.flights[0]
            home = (flight.batch.segment, flight.batch.generation)
            if flight.answer and not flight.void and home not in self.broken:
                for writing in flight.writings:
                    if writing.doomed:
                        failed.append(writing.key)
                        continue
                    assert writing.place is not None
                    self.stored[writing.key] = OnMedium(writing.candidate.parent, writing.first, writing.expires, writing.place)
                    stored.add(writing.key)
                self.flights.pop(0)
                continue
            losing = list(flight.writings)
            if not flight.void:
                self.broken.add(home)
            for writing in losing:
                failed.append(writing.key)
                if not writing.doomed and not flight.void:
                    writing.doomed = True
                    if writing.key not in self.stored:
                        dropped |= self.drop(writing.key)
            self.flights.pop(0)
        return stored, failed, dropped

    def fail_unsent(self, keys: list[BlockKey]) -> set[BlockKey]:
        """What was waiting for a segment that broke has failed too."""
        dropped: set[BlockKey] = set()
        for key in keys:
            (writing,) = [w for w in self.unsent if w.key == key][:1]
            if not writing.doomed:
                writing.doomed = True
                if key not in self.stored:
                    dropped |= self.drop(key)
            self.unsent.remove(writing)
        return dropped

    def expire(self, now: float) -> set[BlockKey]:
        busy = {flight.batch.segment for flight in self.flights}
        busy |= {w.replaces for flight in self.flights for w in flight.writings if w.replaces is not None}
        busy |= {w.replaces for w in self.unsent if w.replaces is not None}
        return {k for k, r in self.stored.items() if r.place[0] not in busy and self.latest[r.place[0]] <= now}

    # --- restart ----------------------------------------------------------------------------------------------------------------

    def recover(self, found: list[RecoveredSegment], now: float) -> None:
        self.stored = {}
        versions: dict[BlockKey, list[tuple[tuple[float, int, int, int], FooterEntry, RecoveredSegment]]] = {}
        self.latest = {}
        for segment in found:
            if not segment.entries or max(e.expires_at for e in segment.entries) <= now:
                continue
            self.latest[segment.id] = 0.0
            for entry in segment.entries:
                age = (entry.expires_at, segment.generation, segment.id, entry.page)
                versions.setdefault(entry.key, []).append((age, entry, segment))
        youngest = {key: max(many, key=lambda v: v[0]) for key, many in versions.items()}
        alone = {
            key: max(firsts, key=lambda v: v[0]) for key, many in versions.items() if (firsts := [v for v in many if v[1].first])
        }
        chosen = dict(youngest)
        changed = True
        while changed:
            changed = False
            for key, (_, entry, _) in list(chosen.items()):
                if entry.parent is None or entry.parent in chosen or chosen[key] is alone.get(key):
                    continue
                if key in alone:
                    chosen[key] = alone[key]
                else:
                    del chosen[key]
                changed = True
        for key, (_, entry, segment) in chosen.items():
            place = (segment.id, segment.generation, entry.page)
            self.stored[key] = OnMedium(entry.parent, entry.first, entry.expires_at, place)
            self.latest[segment.id] = max(self.latest[segment.id], entry.expires_at)
