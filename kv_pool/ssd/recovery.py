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
    """Of two records with the same key the younger; of these all whose parents are there too, or need not be; parents first."""
    youngest: dict[BlockKey, FoundRecord] = {}
    for segment in segments:
        for entry in segment.entries:
            found, known = FoundRecord(segment, entry), youngest.get(entry.key)
            if known is None or found.age > known.age:
                youngest[entry.key] = found
    followers: dict[BlockKey, list[FoundRecord]] = {}
    ready: list[FoundRecord] = []
    for found in youngest.values():
        parent = found.entry.parent
        if parent is not None and parent in youngest:
            followers.setdefault(parent, []).append(found)
        elif parent is None or found.entry.first:
            ready.append(found)
    ready.reverse()
    while ready:
        found = ready.pop()
        yield found
        ready += reversed(followers.get(found.entry.key, ()))
