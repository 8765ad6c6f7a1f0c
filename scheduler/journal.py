"""What a scheduler was told and asked, and what it answered, in order: enough to do it all again elsewhere and compare. Pure.

A journal is a sequence of msgpack arrays. The first is the head, ``["moonpool scheduler journal", version, settings, order]``,
every other one ``[now, input, output]``: an event and the actions it caused, or a route request and its plan or rejection. Data
classes are maps of their fields under their class's name; nothing else than those listed in ``KINDS`` is ever made from a
journal.

Block keys are digests and requests carry no text, so a journal holds nothing that a prompt said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, Final, cast

import msgpack

from decode_worker.task import DecodeLoad
from engine.serving.addresses import BlockSource
from kv_pool.events.types import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from prefill_worker.task import Order, PrefillLoad
from scheduler.index import NodeSnapshot
from scheduler.messages import (
    Action,
    BlocksChanged,
    Event,
    FetchSnapshot,
    Follow,
    NodeLoad,
    NodeReport,
    Notice,
    Reply,
    RequestEnded,
    SnapshotArrived,
    SnapshotFailed,
    SpeedsRecalled,
    Tick,
    Unfollow,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, PlanTerms, Rejection, RouteRequest, SchedulerSettings
from scheduler.speeds import Speeds

TITLE: Final = "moonpool scheduler journal"
VERSION: Final = 1
ROW_BYTES_MAX: Final = 256 * 2**20
"""A snapshot of a node with millions of blocks is one row."""


class JournalError(ValueError):
    """This is no journal, or one of a version that is not known, or it is damaged; the text names the row."""


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A node's snapshot as a journal keeps it."""

    node_id: str
    incarnation: str
    sequence: int
    keys_by_medium: Mapping[str, Collection[BlockKey]]


KINDS: Final = {
    kind.__name__: kind
    for kind in (
        WorkerReport, NodeReport, BlocksChanged, SnapshotArrived, SnapshotFailed, RequestEnded, WorkerFailed, Tick, PrefillLoad,
        DecodeLoad, NodeLoad, EventBatch, BlockStored, BlockRemoved, AllBlocksCleared, KeptSnapshot, RouteRequest, Plan,
        PlanTerms, Rejection, BlockSource, Reply, Notice, Follow, Unfollow, FetchSnapshot, SpeedsRecalled, Speeds,
    )
}  # fmt: skip

_FIELDS: Final = {name: tuple(field.name for field in fields(kind)) for name, kind in KINDS.items()}

Input = Event | RouteRequest
Output = Plan | Rejection | list[Action]


@dataclass(frozen=True, slots=True)
class Row:
    now: float
    input: Input
    output: bytes
    """Packed, as it was written: what a replay must give again."""


def head(settings: SchedulerSettings, order: Order) -> bytes:
    """The first row of a journal."""
    return _packb([TITLE, VERSION, settings.model_dump(mode="json"), order])


def begins_journal(data: bytes) -> bool:
    """Whether a file that begins with ``data`` (32 bytes or more of it) is a journal, or empty."""
    return not data or data[1:].startswith(pack(TITLE))


def row(now: float, given: Input, answer: Output) -> bytes:
    """One more row."""
    return _packb([now, pack(given), pack(answer)])


def pack(value: Any) -> bytes:
    """``value`` alone, the way that rows hold it: equal values give equal bytes."""
    return _packb(value)


def read_journal(stream: BinaryIO) -> tuple[SchedulerSettings, Order, Iterator[Row]]:
    """The settings and the rows. Raises JournalError, also while the rows are read; a last row that is cut short is left out,
    since a process that died may leave one."""
    unpacker = msgpack.Unpacker(stream, max_buffer_size=ROW_BYTES_MAX, strict_map_key=False)
    try:
        title, version, settings, order = next(unpacker)
        if title != TITLE or version != VERSION:
            raise JournalError(f"not a journal of version {VERSION}")
        parsed = SchedulerSettings.model_validate(settings)
    except (StopIteration, ValueError, TypeError, msgpack.UnpackException) as error:
        raise JournalError(f"not a scheduler's journal: {error or 'it is empty'}") from error
    if order not in ("shortest", "fcfs"):
        raise JournalError("not a scheduler's journal: the workers' order is missing")
    return parsed, cast(Order, order), _rows(unpacker)


def _rows(unpacker: Any) -> Iterator[Row]:
    number = 1
    while True:
        number += 1
        try:
            found = next(unpacker, None)
            if found is None:
                return
            now, given, answer = found
            made = _made(msgpack.unpackb(given, strict_map_key=False))
            if not isinstance(now, float) or not isinstance(answer, bytes):
                raise JournalError(f"row {number}: damaged")
        except JournalError:
            raise
        except (KeyError, ValueError, TypeError, msgpack.UnpackException) as error:
            raise JournalError(f"row {number}: damaged ({type(error).__name__})") from error
        yield Row(now, made, answer)


def _plain(value: Any) -> dict[str, Any]:
    """A data class as msgpack can hold it; what it contains comes here in its turn. (msgpack's own recursion is several times
    faster than one of ours, and this runs under the scheduler's lock.)"""
    if isinstance(value, SnapshotArrived):
        return {"SnapshotArrived": {"snapshot": {"KeptSnapshot": _snapshot(value.snapshot)}}}
    kind = type(value).__name__
    return {kind: {field: getattr(value, field) for field in _FIELDS[kind]}}


def _snapshot(snapshot: NodeSnapshot) -> dict[str, Any]:
    # In order: a set has none, and equal journals must be equal bytes.
    keys = {medium: sorted(keys) for medium, keys in sorted(snapshot.keys_by_medium.items())}
    return {
        "node_id": snapshot.node_id, "incarnation": snapshot.incarnation, "sequence": snapshot.sequence, "keys_by_medium": keys,
    }  # fmt: skip


def _made(value: Any) -> Any:
    match value:
        case list():
            return tuple(_made(each) for each in cast("list[Any]", value))
        case dict():
            given = cast("dict[Any, Any]", value)
            name = next(iter(given), None)
            if len(given) == 1 and isinstance(name, str) and name in KINDS and isinstance(given[name], dict):
                return KINDS[name](**{field: _made(each) for field, each in given[name].items()})
            return {field: _made(each) for field, each in given.items()}
        case _:
            return value


def _packb(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value, default=_plain))
