"""Requests under way, and when they stop counting. Pure.

A request occupies its prefill worker until that reports it computed, and its decode worker until that reports it ended. Whatever
is lost on the way, it is over when the gateway says so, when a worker that it needs is given up, when a newer attempt is planned,
when an idle worker does not know it, or at its deadline: nothing stays for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from scheduler.members import DecodeWorker, PrefillWorker, Worker
from scheduler.prefill_queue import RequestAttempt
from scheduler.promises import Promises

LOST_AFTER_S: Final = 5.0
"""A request older than this that an idle worker does not report is not there."""


@dataclass(slots=True)
class Assignment:
    """``prefill`` and ``decode`` are None once their part is over."""

    request: RequestAttempt
    prefill: PrefillWorker | None
    decode: DecodeWorker | None
    deadline: float


class Assignments:
    """At most one per request id: a newer attempt replaces the older one. ``touched`` is told of each worker whose book has
    changed, ``promises`` of what becomes of the blocks that were to be computed."""

    def __init__(self, life_s: float, promises: Promises, touched: Callable[[Worker], None]) -> None:
        self._life_s = life_s
        self._promises = promises
        self._touched = touched
        self._open: dict[str, Assignment] = {}

    def __len__(self) -> int:
        return len(self._open)

    def attempt(self, request_id: str) -> int | None:
        """The attempt that is under way."""
        assignment = self._open.get(request_id)
        return None if assignment is None else assignment.request[1]

    def find(self, request: RequestAttempt) -> Assignment | None:
        """The assignment of exactly this attempt, while it is under way."""
        assignment = self._open.get(request[0])
        return assignment if assignment is not None and assignment.request == request else None

    def add(self, request: RequestAttempt, prefill: PrefillWorker, decode: DecodeWorker | None, now: float) -> None:
        """The workers' own books must have the request already; a request id that is under way is an error of the caller."""
        assert request[0] not in self._open
        self._open[request[0]] = Assignment(request, prefill, decode, now + self._life_s)
        self._touched(prefill)
        if decode is not None:
            self._touched(decode)

    def prefill_ended(self, request: RequestAttempt, now: float) -> None:
        assignment = self.find(request)
        if assignment is None or assignment.prefill is None:
            return
        assignment.prefill.queue.end(request, now)
        self._touched(assignment.prefill)
        self._promises.computed(request, now)
        assignment.prefill = None
        if assignment.decode is None:
            del self._open[request[0]]
        else:
            assignment.decode.room.prefilled(request, now)

    def end(self, request: RequestAttempt, now: float) -> None:
        """The whole request is over. Ended, unknown and superseded attempts are ignored."""
        assignment = self.find(request)
        if assignment is None:
            return
        del self._open[request[0]]
        self._promises.broken(request)
        if assignment.prefill is not None:
            assignment.prefill.queue.end(request, now)
            self._touched(assignment.prefill)
        if assignment.decode is not None:
            assignment.decode.room.end(request)
            self._touched(assignment.decode)

    def end_request(self, request_id: str, now: float) -> None:
        """Whatever attempt of it is under way is over."""
        attempt = self.attempt(request_id)
        if attempt is not None:
            self.end((request_id, attempt), now)

    def drop(self, worker: Worker, now: float) -> int:
        """``worker`` is given up: all that still needs it is over. Returns how many."""
        lost = list(_open_at(worker))
        for request in lost:
            self.end(request, now)
        return len(lost)

    def drop_unknown(self, worker: Worker, now: float) -> int:
        """``worker`` reports that it has nothing to do: what it should have had for a while, it does not have."""
        lost = [request for request, assigned in _open_at(worker).items() if assigned <= now - LOST_AFTER_S]
        for request in lost:
            if isinstance(worker, PrefillWorker):
                self.prefill_ended(request, now)  # it may well be computed, with the report of it lost: decode goes on
            else:
                self.end(request, now)
        return len(lost)

    def expire(self, now: float) -> int:
        """End those past their deadline. They are in the order of their deadlines, as all live equally long."""
        expired = 0
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.deadline > now:
                break
            self.end(oldest.request, now)
            expired += 1
        return expired


def _open_at(worker: Worker) -> dict[RequestAttempt, float]:
    """Requests in the worker's own book, with when they were assigned."""
    match worker:
        case PrefillWorker():
            return {request: work.assigned for request, work in worker.queue.open.items()}
        case DecodeWorker():
            return {request: charge.assigned for request, charge in worker.room.open.items()}
        case _:
            raise TypeError(f"{type(worker).__name__} has no requests")
