"""When to ask which node for a snapshot: one question at a time per node, with growing pauses. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

FETCH_LOST_S: Final = 30.0
"""A question without any answer counts as failed after this."""
PAUSE_FIRST_S: Final = 0.25
PAUSE_MAX_S: Final = 8.0


@dataclass(slots=True)
class _Fetch:
    incarnation: str
    not_before: float
    failures: int = 0


class SnapshotSchedule:
    """Keeps an entry per node that was asked; ``keep`` drops those of nodes that are gone."""

    def __init__(self) -> None:
        self._fetches: dict[str, _Fetch] = {}

    def may_ask(self, node_id: str, incarnation: str, now: float) -> bool:
        """Whether to ask now; True counts as asked."""
        fetch = self._fetches.get(node_id)
        if fetch is not None and fetch.incarnation == incarnation and now < fetch.not_before:
            return False
        failures = fetch.failures if fetch is not None and fetch.incarnation == incarnation else 0
        self._fetches[node_id] = _Fetch(incarnation, now + FETCH_LOST_S, failures)
        return True

    def arrived(self, node_id: str, now: float) -> None:
        fetch = self._fetches.get(node_id)
        if fetch is not None:
            fetch.failures, fetch.not_before = 0, now + PAUSE_FIRST_S

    def failed(self, node_id: str, incarnation: str, now: float) -> None:
        fetch = self._fetches.get(node_id)
        if fetch is not None and fetch.incarnation == incarnation:
            fetch.not_before = now + min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(fetch.failures, 16))
            fetch.failures += 1

    def keep(self, node_ids: Container[str]) -> None:
        """Forget all nodes but these."""
        for node_id in [node_id for node_id in self._fetches if node_id not in node_ids]:
            del self._fetches[node_id]
