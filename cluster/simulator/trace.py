"""Recorded traffic in Mooncake's form: one JSON object a line, ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens)
and ``hash_ids`` (one id for each block of the prompt, the last of which may be partial); optionally ``class``, ``session``,
``turn``.

A file is read and checked whole before anything is done with it. What is wrong is named by line and field.
"""

from __future__ import annotations

import io
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, cast

from kv_pool.keys import BlockKey

TICK_S: Final = 3.0
"""Mooncake's recorder wrote times of so coarse a clock: what has one time came within it."""
REQUESTS_MAX: Final = 5_000_000
LINE_BYTES_MAX: Final = 4 * 2**20
TOKENS_MAX: Final = 10_000_000
ID_MAX: Final = 2**63
TIMESTAMP_MAX_MS: Final = 2**53
"""Beyond it a float does not tell one millisecond from the next."""
TEXT_BYTES_MAX: Final = 256
SPAN_MAX_S: Final = 31 * 86400.0
"""Of a replay in time, which costs a heartbeat a second however little happens."""


class TraceError(ValueError):
    """``file:line: field: what is wrong``."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``block_ids`` name the prompt's blocks, prefix blocks all: equal ids stand for equal tokens and an equal past."""

    index: int
    arrived_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    request_class: str = ""
    session: str | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, the first at 0 seconds."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrived_s if self.requests else 0.0

    def full_blocks(self, request: TraceRequest) -> tuple[int, ...]:
        """Ids of the blocks that engines cache: the whole ones."""
        return request.block_ids[: request.input_tokens // self.block_tokens]

    def faster(self, speed: float) -> Trace:
        """The same requests ``speed`` times as fast."""
        requests = tuple(replace(request, arrived_s=request.arrived_s / speed) for request in self.requests)
        return Trace(self.name, self.block_tokens, requests)


def key_of(block_id: int) -> BlockKey:
    """The pool's key of a block of a trace: a fixed function of its id."""
    return BlockKey(block_id.to_bytes(16, "big"))


def read_trace(
    path: Path, *, block_tokens: int = 512, tick_s: float | None = None, speed: float = 1.0, limit: int | None = None,
    span_max_s: float = SPAN_MAX_S,
) -> Trace:  # fmt: skip
    """Read ``path`` (``.jsonl``, ``.jsonl.xz``). Requests of one tick are spread evenly over ``tick_s``; None: over
    :data:`TICK_S` if all times are on such ticks. ``limit``: only so many requests. ``span_max_s``: the longest that it may last
    at ``speed``. Raises TraceError, OSError."""
    requests = [_request(place, index, row, block_tokens) for index, (place, row) in enumerate(_rows(path, limit))]
    if not requests:
        raise TraceError(f"{path.name}: there is no request in it")
    for before, request in pairwise(requests):
        if request.arrived_s < before.arrived_s:
            raise TraceError(f"{path.name}:{request.index + 1}: timestamp: before that of the line above; sort the trace by time")
    if tick_s is None:
        tick_s = TICK_S if len(requests) > 1 and all(math.fmod(r.arrived_s, TICK_S) == 0.0 for r in requests) else 0.0
    spread = list(_spread(requests, tick_s))
    first = spread[0].arrived_s
    if (last_s := (spread[-1].arrived_s - first) / speed) > span_max_s:
        days = span_max_s / 86400
        raise TraceError(
            f"{path.name}:{len(requests)}: timestamp: {last_s / 86400:g} days after the first; {days:g} are the most"
        )
    moved = tuple(replace(request, arrived_s=(request.arrived_s - first) / speed) for request in spread)
    return Trace(path.name.split(".")[0], block_tokens, moved)


def _rows(path: Path, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as opened:
        lines = cast(io.BufferedReader, opened)
        number = 0
        while limit is None or number < limit:
            try:
                line = lines.readline(LINE_BYTES_MAX + 1)
            except (EOFError, lzma.LZMAError) as error:
                raise TraceError(f"{path.name}:{number + 1}: the file is cut or damaged here ({error})") from error
            if not line:
                return
            number += 1
            place = f"{path.name}:{number}"
            if len(line) > LINE_BYTES_MAX:
                raise TraceError(f"{place}: the line is longer than {LINE_BYTES_MAX} bytes")
            if number > REQUESTS_MAX:
                raise TraceError(f"{place}: more than {REQUESTS_MAX} requests")
            yield place, _row(place, line)


def _row(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise TraceError(f"{place}: this is nested too deeply") from error
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else ", and the file ends in it: it may be truncated"
        raise TraceError(f"{place}: this is not JSON{cut}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{place}: an object is needed, not {type(row).__name__}")
    return cast(dict[str, Any], row)


def _request(place: str, index: int, row: dict[str, Any], block_tokens: int) -> TraceRequest:
    arrived_ms = _number(place, row, "timestamp")
    input_tokens = _whole(place, row, "input_length", 1)
    output_tokens = max(1, _whole(place, row, "output_length", 0))  # prefill draws one in any case
    ids = _ids(place, row)
    full, needed = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if not full <= len(ids) <= needed:
        raise TraceError(
            f"{place}: hash_ids: {len(ids)} ids do not fit input_length {input_tokens} in blocks of {block_tokens} tokens "
            f"({full} to {needed} are needed)"
        )
    return TraceRequest(
        index, arrived_ms / 1000.0, input_tokens, output_tokens, ids,
        _text(place, row, "class") or "", _text(place, row, "session"),
        None if row.get("turn") is None else _whole(place, row, "turn", 0),
    )  # fmt: skip


def _number(place: str, row: dict[str, Any], field: str) -> float:
    value = _there(place, row, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise TraceError(f"{place}: {field}: a number is needed, not {_shown(value)}")
    if value < 0:
        raise TraceError(f"{place}: {field}: {_shown(value)} is negative")
    if value > TIMESTAMP_MAX_MS:
        raise TraceError(f"{place}: {field}: {_shown(value)} is beyond {TIMESTAMP_MAX_MS}")
    return float(value)


def _whole(place: str, row: dict[str, Any], field: str, least: int) -> int:
    value = _there(place, row, field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{place}: {field}: a whole number is needed, not {_shown(value)}")
    if not least <= value <= TOKENS_MAX:
        raise TraceError(f"{place}: {field}: {value} is not from {least} to {TOKENS_MAX}")
    return value


def _ids(place: str, row: dict[str, Any]) -> tuple[int, ...]:
    value = _there(place, row, "hash_ids")
    if not isinstance(value, list):
        raise TraceError(f"{place}: hash_ids: a list is needed, not {_shown(value)}")
    for at, each in enumerate(cast(list[Any], value)):
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < ID_MAX:
            raise TraceError(f"{place}: hash_ids[{at}]: a whole number from 0 is needed, not {_shown(each)}")
    ids = tuple(cast(list[int], value))
    if len(set(ids)) != len(ids):
        raise TraceError(f"{place}: hash_ids: an id is there twice; prefix blocks of one prompt all differ")
    return ids


def _text(place: str, row: dict[str, Any], field: str) -> str | None:
    value = row.get(field)
    if isinstance(value, str):
        if len(value.encode(errors="replace")) > TEXT_BYTES_MAX or not _encodes(value):
            raise TraceError(f"{place}: {field}: {_shown(value)} is longer than {TEXT_BYTES_MAX} bytes or no valid text")
        return value
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TraceError(f"{place}: {field}: a text is needed, not {_shown(value)}")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON lets through
        return False
    return True


def _there(place: str, row: dict[str, Any], field: str) -> Any:
    if field not in row:
        raise TraceError(f"{place}: {field}: is missing")
    return row[field]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _spread(requests: list[TraceRequest], tick_s: float) -> Iterator[TraceRequest]:
    for arrived_s, group in groupby(requests, key=lambda request: request.arrived_s):
        together = list(group)
        for place, request in enumerate(together):
            yield replace(request, arrived_s=arrived_s + tick_s * place / len(together))
