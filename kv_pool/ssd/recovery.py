"""Which of the records found at the start are worth having, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kv_pool.keys import BlockKey
from kv_pool.ssd.records import FooterEntry, RecoveredSegment


@dataclass(frozen=True, slots=True)
class FoundRecord:
    segment: RecoveredSegment
    entry: FooterEntry

    @property
    def age(self) -> tuple[float, int, int, int]:
        """The greater, the younger. Generations tell only within a segment, so expiry comes first."""
        return self.entry.expires_at, self.segment.generation, self.segment.id, self.entry.page


def last_expiry(segment: RecoveredSegment) -> float | None:
    return max((entry.expires_at for entry in segment.entries), default=None)


def worth_having(segments: Iterable[RecoveredSegment]) -> Iterator[FoundRecord]:
    """Of two records with the same key the younger; of these all whose parents are worth having too, or need not be; parents
    first. Where the younger counts on a parent that is not there, an older one that does not will do."""
    youngest: dict[BlockKey, FoundRecord] = {}
    alone: dict[BlockKey, FoundRecord] = {}
    for segment in segments:
        for entry in segment.entries:
            found = FoundRecord(segment, entry)
            _keep_younger(youngest, found)
            if entry.first:
                _keep_younger(alone, found)
    followers: dict[BlockKey, list[FoundRecord]] = {}
    ready: list[FoundRecord] = []
    parentless: list[FoundRecord] = []
    for found in youngest.values():
        parent = found.entry.parent
        if parent is None:
            ready.append(found)
        elif parent in youngest:
            followers.setdefault(parent, []).append(found)
        else:
            parentless.append(found)
    while parentless:
        found = parentless.pop()
        substitute = alone.get(found.entry.key)
        if substitute is not None:
            ready.append(substitute)
        else:
            parentless += followers.pop(found.entry.key, ())
    while ready:
        found = ready.pop()
        yield found
        ready += followers.get(found.entry.key, ())


def _keep_younger(kept: dict[BlockKey, FoundRecord], found: FoundRecord) -> None:
    known = kept.get(found.entry.key)
    if known is None or found.age > known.age:
        kept[found.entry.key] = found
