"""What routing needs to know of every worker, in columns. Pure.

The members (``members.py``) are the truth; a row here is a copy of one, made whenever an event has touched it (:meth:`put`), so
that a decision reads a few arrays instead of a thousand objects. What only time changes (silence, quarantine, ramp, a queue that
runs down) is worked out from the row's times when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.members import RAMP_FIRST, RAMP_GROWTH, DecodeWorker, Node, PrefillWorker, Worker
from scheduler.routing.view import DecodeView, OpenWork, PrefillView

ROWS_FIRST: Final = 8
PLACES_FIRST: Final = 4

W = TypeVar("W", bound=Worker)
Bools = NDArray[np.bool_]


class Columns(Generic[W]):
    """Rows in the order of joining; a row that was given back is taken again."""

    _FLOATS: tuple[str, ...] = ()
    _INTS: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.ids: list[str] = []
        """By row; empty for a row that is nobody's."""
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._column: dict[str, NDArray[Any]] = {
            name: np.zeros(ROWS_FIRST, kind)
            for kind, names in (
                (np.float64, ("heard_at", "node_heard_at", "blamed_until", "ramp_until", *self._FLOATS)),
                (np.int64, ("node", "in_flight", "ramp_room", *self._INTS)),
                (np.bool_, ("attached",)),
            )
            for name in names
        }

    def row(self, worker_id: str) -> int | None:
        return self._row_of.get(worker_id)

    def put(self, worker: W, node: Node | None, slot: int) -> None:
        """Copy ``worker``; ``node`` is its pool node (None: unknown) in index slot ``slot``."""
        row = self._row_of.get(worker.id)
        if row is None:
            row = self._new_row(worker.id)
        at = self._column
        attached = (
            not worker.dead and node is not None and not node.dead and not node.draining
            and worker.attached_node == node.incarnation
        )  # fmt: skip
        at["attached"][row] = attached
        at["heard_at"][row] = worker.heard_at
        at["node_heard_at"][row] = node.heard_at if node is not None else -np.inf
        at["blamed_until"][row] = worker.quarantine.until
        at["ramp_until"][row] = worker.ramp.until
        at["ramp_room"][row] = RAMP_FIRST + RAMP_GROWTH * worker.ramp.finished
        at["in_flight"][row] = worker.in_flight
        at["node"][row] = slot
        self._fill(row, worker)

    def remove(self, worker_id: str) -> None:
        row = self._row_of.pop(worker_id, None)
        if row is not None:
            self.ids[row] = ""
            self._column["attached"][row] = False
            self._free.append(row)

    def able(self, now: float, suspect_after_s: float, avoid: Iterable[str]) -> Bools:
        """Who may get work: live as :meth:`~scheduler.members.Worker.standing` says, and those that are being ramped up only
        within their ramp, unless there are no others."""
        at, size = self._column, len(self.ids)
        horizon = now - suspect_after_s
        live: Bools = at["attached"][:size] & (at["heard_at"][:size] >= horizon) & (at["node_heard_at"][:size] >= horizon)
        live &= at["blamed_until"][:size] <= now
        for worker_id in avoid:
            row = self._row_of.get(worker_id)
            if row is not None:
                live[row] = False
        open_to: Bools = live & ((at["ramp_until"][:size] <= now) | (at["in_flight"][:size] < at["ramp_room"][:size]))
        return open_to if open_to.any() else live

    def _fill(self, row: int, worker: W) -> None:
        raise NotImplementedError

    def _new_row(self, worker_id: str) -> int:
        if self._free:
            row = self._free.pop()
            self.ids[row] = worker_id
        else:
            row = len(self.ids)
            self.ids.append(worker_id)
            if row == len(self._column["node"]):
                self._grow()
        self._row_of[worker_id] = row
        return row

    def _grow(self) -> None:
        for name, column in self._column.items():
            self._column[name] = np.concatenate([column, np.zeros_like(column)])


class PrefillColumns(Columns[PrefillWorker]):
    _FLOATS = (
        "left_s", "as_of", "open_s", "per_token", "per_token_position", "dram_s_per_byte", "ssd_s_per_byte", "piece_s",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._precedence = np.full((ROWS_FIRST, PLACES_FIRST), np.inf)
        self._seconds = np.zeros((ROWS_FIRST, PLACES_FIRST))
        self._open = np.zeros(ROWS_FIRST, np.int64)
        """Requests open at each row."""

    def view(self, now: float, able: Bools) -> PrefillView:
        at, size = self._column, len(self.ids)
        queue_s = np.maximum(0.0, at["left_s"][:size] - (now - at["as_of"][:size]))
        work = OpenWork(self._precedence[:size], self._seconds[:size], at["open_s"][:size] - queue_s, at["piece_s"][:size])
        return PrefillView(
            self.ids, at["node"][:size], able, queue_s, at["per_token"][:size], at["per_token_position"][:size],
            at["dram_s_per_byte"][:size], at["ssd_s_per_byte"][:size], work,
        )  # fmt: skip

    def _fill(self, row: int, worker: PrefillWorker) -> None:
        at, queue = self._column, worker.queue
        at["left_s"][row], at["as_of"][row], at["open_s"][row] = queue.left_s, queue.as_of, queue.open_s
        at["piece_s"][row] = queue.piece_s
        at["per_token"][row], at["per_token_position"][row] = queue.speed.per_token, queue.speed.per_token_position
        at["dram_s_per_byte"][row], at["ssd_s_per_byte"][row] = worker.loads.per_byte[:2]
        count = len(queue.open)
        self._fit(row, count)
        places = self._precedence[row]
        places[count:] = np.inf
        if count:
            places[:count] = [work.precedence for work in queue.open.values()]
            self._seconds[row, :count] = [work.seconds for work in queue.open.values()]

    def remove(self, worker_id: str) -> None:
        row = self.row(worker_id)
        if row is not None:
            self._open[row] = 0
        super().remove(worker_id)

    def _fit(self, row: int, count: int) -> None:
        """As many places as the fullest row needs; after a rush no more of them than four times as many."""
        fewer = count < self._open[row]
        self._open[row] = count
        width = self._precedence.shape[1]
        while count > width:
            self._precedence = np.concatenate([self._precedence, np.full_like(self._precedence, np.inf)], axis=1)
            self._seconds = np.concatenate([self._seconds, np.zeros_like(self._seconds)], axis=1)
            width *= 2
        if fewer and width > PLACES_FIRST and 4 * count <= width and 4 * int(self._open.max()) <= width:
            self._precedence = self._precedence[:, : width // 2].copy()
            self._seconds = self._seconds[:, : width // 2].copy()

    def _grow(self) -> None:
        super()._grow()
        self._open = np.concatenate([self._open, np.zeros_like(self._open)])
        self._precedence = np.concatenate([self._precedence, np.full_like(self._precedence, np.inf)])
        self._seconds = np.concatenate([self._seconds, np.zeros_like(self._seconds)])


class DecodeColumns(Columns[DecodeWorker]):
    _FLOATS = ("step_s", "step_s_per_sequence", "step_s_per_token")
    _INTS = ("room_blocks", "total_blocks", "sequences", "context_tokens")

    def view(self, able: Bools) -> DecodeView:
        at, size = self._column, len(self.ids)
        return DecodeView(
            self.ids, at["node"][:size], able, at["room_blocks"][:size], at["total_blocks"][:size], at["sequences"][:size],
            at["context_tokens"][:size], at["step_s"][:size], at["step_s_per_sequence"][:size], at["step_s_per_token"][:size],
        )  # fmt: skip

    def _fill(self, row: int, worker: DecodeWorker) -> None:
        at, room = self._column, worker.room
        at["room_blocks"][row], at["total_blocks"][row] = room.blocks, room.total_blocks
        at["sequences"][row], at["context_tokens"][row] = room.sequences, room.context_tokens
        step = worker.step_time.coefficients
        at["step_s"][row], at["step_s_per_sequence"][row], at["step_s_per_token"][row] = step
