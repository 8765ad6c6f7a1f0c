"""What a scheduler has learnt of its workers and links, as plain data that outlives it: JSON with a version and bounds. Pure.

Only speeds are kept, by the names of workers and nodes. They hold for one model on one set of machines, so the data say which
(``model``), and are worth no more than a first guess: whoever recalls them lets the next observations outweigh them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from scheduler.routing.links import SPEED_MAX, SPEED_MIN
from scheduler.routing.load_speed import PER_BYTE_MAX, PER_BYTE_MIN

VERSION: Final = 1
MEMBERS_MAX: Final = 8192
"""Workers of each role, and nodes."""
LINKS_MAX: Final = 4096
"""They are collected under the scheduler's lock, a few milliseconds for so many."""
BYTES_MAX: Final = 16 * 2**20
"""Of the JSON; full tables of long names take less."""

PrefillLine = tuple[float, float]
"""Seconds per token, and per token and token of position (:mod:`scheduler.routing.prefill_speed`)."""
LoadTimes = tuple[float, float, float, float]
"""Seconds per byte by medium (:mod:`scheduler.routing.load_speed`)."""
StepTimes = tuple[float, float, float]
"""Seconds of a decode step: base, per sequence, per context token (:mod:`engine.serving.step_time`)."""
Link = tuple[str, str, float]
"""Source node, target node, bytes per second."""


class SpeedsError(ValueError):
    """These are no speeds, or not of this version, or a value is out of its bounds; the text names it."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """By worker id, but ``senders`` (bytes per second to wherever) by node id."""

    prefill: Mapping[str, PrefillLine] = field(default_factory=dict[str, PrefillLine])
    loads: Mapping[str, LoadTimes] = field(default_factory=dict[str, LoadTimes])
    steps: Mapping[str, StepTimes] = field(default_factory=dict[str, StepTimes])
    senders: Mapping[str, float] = field(default_factory=dict[str, float])
    links: tuple[Link, ...] = ()


_TABLES: Final = tuple(table.name for table in fields(Speeds))

_Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_PerToken = Annotated[float, Field(ge=1e-9, le=10.0)]
_PerPosition = Annotated[float, Field(ge=0.0, le=1e-2)]
_PerByte = Annotated[float, Field(ge=PER_BYTE_MIN, le=PER_BYTE_MAX)]
_StepBase = Annotated[float, Field(ge=0.0, le=60.0)]
_PerSequence = Annotated[float, Field(ge=0.0, le=10.0)]
_Speed = Annotated[float, Field(ge=SPEED_MIN, le=SPEED_MAX)]
_Few = Field(max_length=MEMBERS_MAX)


class _Kept(BaseModel):
    """The JSON."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    version: Annotated[int, Field(ge=VERSION, le=VERSION)]
    model: Annotated[str, StringConstraints(max_length=4096)]
    prefill: Annotated[dict[_Name, tuple[_PerToken, _PerPosition]], _Few]
    loads: Annotated[dict[_Name, tuple[_PerByte, _PerByte, _PerByte, _PerByte]], _Few]
    steps: Annotated[dict[_Name, tuple[_StepBase, _PerSequence, _PerPosition]], _Few]
    senders: Annotated[dict[_Name, _Speed], _Few]
    links: Annotated[tuple[tuple[_Name, _Name, _Speed], ...], Field(max_length=LINKS_MAX)]


def to_json(speeds: Speeds, model: str) -> bytes:
    """What was learnt while ``model`` was served. An entry that is out of its bounds is left out, since nobody would take the
    file with it. Raises SpeedsError where that does not help."""
    data: dict[str, Any] = {"version": VERSION, "model": model} | {table: getattr(speeds, table) for table in _TABLES}
    try:
        try:
            kept = _Kept.model_validate(data)
        except ValidationError as error:
            kept = _Kept.model_validate(_without(data, {error["loc"][:2] for error in error.errors()}))
    except ValidationError as error:
        raise SpeedsError(_first(error)) from error
    return kept.model_dump_json(indent=1).encode()


def from_json(data: bytes) -> tuple[Speeds, str]:
    """The speeds, and the model that they were learnt with. Raises SpeedsError: a file is taken whole or not at all."""
    if len(data) > BYTES_MAX:
        raise SpeedsError(f"longer than {BYTES_MAX} bytes")
    try:
        kept = _Kept.model_validate_json(data)
    except ValidationError as error:
        raise SpeedsError(_first(error)) from error
    return Speeds(kept.prefill, kept.loads, kept.steps, kept.senders, kept.links), kept.model


def _without(data: dict[str, Any], places: Container[tuple[int | str, ...]]) -> dict[str, Any]:
    """``data`` less the entries at ``places``, each (table, name or number)."""
    left: dict[str, Any] = {}
    for table, entries in data.items():
        match entries:
            case dict():
                named = cast("dict[str, Any]", entries)
                left[table] = {name: entry for name, entry in named.items() if (table, name) not in places}
            case tuple():
                numbered = cast("tuple[Any, ...]", entries)
                left[table] = tuple(entry for i, entry in enumerate(numbered) if (table, i) not in places)
            case _:
                left[table] = entries
    return left


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(each) for each in found['loc']) or 'the whole'}: {found['msg']}"
