"""What is on the medium and what is on its way there, kept prefix-closed. Pure.

A record whose parent was on the medium leaves with it. One that was written ``first`` (its parent was not there) stays when a
parent that was never there fails to get there. What is being written belongs to the same chains, but is not found yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_pool.keys import BlockKey
from kv_pool.ssd.index import Index
from kv_pool.ssd.keytable import NONE
from kv_pool.ssd.records import PAGE, FooterEntry, Place, Record, record_pages
from kv_pool.ssd.segments import Segment, Segments


@dataclass(slots=True, eq=False)
class Item:
    """A record on its way. ``replaced`` is the segment in which an older one of the same key lies meanwhile. A ``doomed`` item is
    written all the same, as dead bytes: its key left while it was on its way."""

    row: int
    place: Place
    record: Record
    slot: int
    replaced: Segment | None
    sent: bool = False
    doomed: bool = False


class Chains:
    """Owns the index and what is being written; tells the segments what is alive in them."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.index = Index()
        self.pending: dict[int, Item] = {}
        """By row, but for doomed ones."""

    def here(self, row: int) -> bool:
        """On the medium or on its way."""
        return row in self.pending or self.index.on_medium(row)

    def keys(self) -> list[BlockKey]:
        """Of all records on the medium, parents before children."""
        return [self.index.key(row) for row in self.index.walk() if self.index.on_medium(row)]

    def ancestors(self, key: BlockKey | None) -> list[int]:
        """Rows of ``key`` and of all that it follows, as far as they are here."""
        found: list[int] = []
        row = None if key is None else self.index.row(key)
        while row is not None and row != NONE and self.here(row):
            found.append(row)
            row = self.index.parent(row)
        return found

    # --- on the way -------------------------------------------------------------------------------------------------------------

    def stored(self, item: Item) -> None:
        """An item that is not doomed has reached the medium."""
        row, record = item.row, item.record
        self._displace(row)
        self.index.place(
            row,
            segment=item.place.segment,
            page=item.place.page,
            length=record.length,
            tokens=record.tokens,
            first=record.first,
            expires=record.expires_at,
        )
        del self.pending[row]

    def failed(self, item: Item) -> list[BlockKey]:
        """An item has not reached the medium. An older record of its key stays; without one, what follows goes too. Returns the
        keys that are not on the medium any more."""
        if item.doomed:
            return []
        self._doom(item)
        return [] if self.index.on_medium(item.row) else self.drop(item.row)

    # --- leaving ----------------------------------------------------------------------------------------------------------------

    def drop(self, row: int) -> list[BlockKey]:
        """The row and what follows it leave. Returns those keys that were on the medium, parents before children."""
        above = self.index.parent(row)
        leaving, order, gone = [row], list[int](), list[BlockKey]()
        while leaving:
            row = leaving.pop()
            order.append(row)
            was_here = self.index.on_medium(row)
            if was_here:
                gone.append(self.index.key(row))
                self._displace(row)
            item = self.pending.get(row)
            if item is not None:
                self._doom(item)
            leaving += [child for child in self.index.children(row) if was_here or not self._stands_alone(child)]
        for row in reversed(order):
            if self.index.has_children(row):
                self.index.unlink(row)  # a ghost from now on
            else:
                self.index.remove(row)
        if above != NONE and not self.here(above) and not self.index.has_children(above):
            self.index.remove(above)
        return gone

    def kill(self, segment: Segment) -> list[BlockKey]:
        """All records of a segment leave, and what follows them anywhere. Nothing may be on its way to it."""
        gone: list[BlockKey] = []
        for row in segment.rows:
            if self.index.segment(row) == segment.id:
                gone += self.drop(row)
        self.segments.kill(segment)
        return gone

    def forget(self) -> None:
        """The disk is gone: nothing is here any more, and what is on its way is doomed."""
        for item in self.pending.values():
            item.doomed = True
        self.pending.clear()
        self.index = Index()
        self.segments.forget()

    # --- footers ----------------------------------------------------------------------------------------------------------------

    def footer_entries(self, segment: Segment) -> tuple[FooterEntry, ...]:
        """What is alive in a segment, or will be when all that is on its way has arrived; in order of pages."""
        entries: dict[int, FooterEntry] = {}
        index = self.index
        for row in segment.rows:
            item = self.pending.get(row)
            if item is not None and item.place.segment == segment.id:
                record, page = item.record, item.place.page
                entries[page] = FooterEntry(
                    record.key, record.parent, record.first, page, record.length, record.tokens, record.expires_at
                )
            if index.segment(row) == segment.id:
                above, page = index.parent(row), index.page(row)
                parent = None if above == NONE else index.key(above)
                entries[page] = FooterEntry(
                    index.key(row), parent, index.first(row), page, index.length(row), index.tokens(row), index.expires(row)
                )
        return tuple(entries[page] for page in sorted(entries))

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _stands_alone(self, child: int) -> bool:
        """Whether a row stays although its parent, which was never on the medium, does not get there. What of it counted on the
        parent is doomed."""
        item = self.pending.get(child)
        if not self.index.on_medium(child):
            return item is not None and item.record.first
        if item is not None and not item.record.first:
            self._doom(item)
        return self.index.first(child)

    def _displace(self, row: int) -> None:
        if self.index.on_medium(row):
            self.segments.deaden(self.index.segment(row), self.index.length(row))
            self.index.displace(row)

    def _doom(self, item: Item) -> None:
        item.doomed = True
        del self.pending[item.row]
        self.segments.deaden(item.place.segment, item.place.length)

    # --- for tests --------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that all tables tell the same, and that no record is here without its parent."""
        index, alive = self.index, [0] * len(self.segments.all)
        reached = 0
        for row in index.walk():
            reached += 1
            above = index.parent(row)
            if index.on_medium(row):
                alive[index.segment(row)] += record_pages(index.length(row))
                assert index.first(row) or above == NONE or index.on_medium(above)
            elif row not in self.pending:
                assert above == NONE, "a ghost follows nothing"
                assert index.has_children(row), "a ghost is followed"
        assert reached == len(index)
        for item in self.pending.values():
            assert not item.doomed
            alive[item.place.segment] += record_pages(item.place.length)
            assert item.place.generation == self.segments.all[item.place.segment].generation
        assert alive == [segment.live_bytes // PAGE for segment in self.segments.all]
