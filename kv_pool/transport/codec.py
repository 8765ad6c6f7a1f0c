"""Messages between a node and its clients: msgpack maps ``{"op": ..., "inc": the node's incarnation, field: value, ...}``.

One table says what each message is made of, and both directions are checked against it, field by field, before anything is done
about them. Whatever does not fit is a :class:`MalformedMessageError`; nothing is allocated on its word. A block's bytes follow as
a second frame, raw.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, cast

import msgpack

from kv_pool.keys import KEY_BYTES
from kv_pool.node import messages as m

KEYS_MAX: Final = 8192
GRANTS_MAX: Final = 256
SOURCES_MAX: Final = 8
META_BYTES_MAX: Final = 2048
"""As much as an SSD record holds."""
NAME_CHARS_MAX: Final = 256
HEADER_BYTES_MAX: Final = 512 * 1024
TIMEOUT_S_MAX: Final = 24 * 3600.0
TOKENS_MAX: Final = 2**20
SIZE_MAX: Final = 2**40
INTEGER_MAX: Final = 2**63 - 1
ENDPOINT = re.compile(r"tcp://[A-Za-z0-9_.\-\[\]:]{1,253}:[0-9]{1,5}(\?key=[0-9a-f]{64})?")

Message = m.Request | m.Question | m.Answer


class MalformedMessageError(ValueError):
    """Not a message of this protocol. The text names the field, never its content."""


@dataclass(frozen=True, slots=True)
class Field:
    """``read`` returns the checked value or raises ValueError saying what is needed; ``pack`` is its inverse."""

    read: Callable[[Any], Any]
    pack: Callable[[Any], Any] | None = None


def _field(ok: Callable[[Any], bool], what: str, convert: Callable[[Any], Any] | None = None) -> Field:
    """A field whose value must be ``ok``; ``what`` says what is needed instead."""

    def read(value: Any) -> Any:
        if not ok(value):
            raise ValueError(what)
        return value if convert is None else convert(value)

    return Field(read)


def _integer(high: int = INTEGER_MAX) -> Field:
    return _field(lambda value: type(value) is int and 0 <= value <= high, f"an integer of 0 .. {high} is needed")


def _is_key(value: Any) -> bool:
    return type(value) is bytes and len(value) == KEY_BYTES


def _are_keys(value: Any) -> bool:
    """Sets of types and lengths: a long chain has many keys."""
    return (
        type(value) is list
        and 1 <= len(value) <= KEYS_MAX
        and set(map(type, value)) == {bytes}
        and set(map(len, value)) == {KEY_BYTES}
        and len(set(value)) == len(value)
    )


def _is_peer(value: Any) -> bool:
    match value:
        case [str(node_id), str(endpoint)]:
            return len(node_id) <= NAME_CHARS_MAX and ENDPOINT.fullmatch(endpoint) is not None
        case _:
            return False


def _are_slots(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= KEYS_MAX
        and all(slot is None or (type(slot) is int and 0 <= slot <= SIZE_MAX) for slot in value)
    )


def _are_peers(value: Any) -> bool:
    return type(value) is list and len(value) <= SOURCES_MAX and all(map(_is_peer, value))


def _are_metas(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= GRANTS_MAX
        and all(type(meta) is bytes and len(meta) <= META_BYTES_MAX for meta in value)
    )


def _are_leases(value: Any) -> bool:
    return (
        type(value) is list
        and 1 <= len(value) <= KEYS_MAX
        and set(map(type, value)) == {int}
        and min(value) >= 0
        and max(value) <= INTEGER_MAX
    )


def _check_granted(granted: m.Granted) -> None:
    """What no field shows alone. Raises ValueError."""
    count = len(granted.tiers)
    if not 1 <= count <= GRANTS_MAX or len(granted.rows) != count * m.GRANT_ROW.size or len(granted.metas) not in (0, count):
        raise ValueError("a row, a tier and (all or none) a meta for each of the blocks are needed")
    if any(tier >= len(m.Tier) for tier in granted.tiers):
        raise ValueError("unknown tier")


def _one_of(kind: type[StrEnum]) -> Field:
    by_value = {member.value: member for member in kind}
    field = _field(lambda value: type(value) is str and value in by_value, f"a {kind.__name__} is needed", by_value.__getitem__)
    return Field(field.read, lambda member: member.value)


def _optional(field: Field) -> Field:
    inner_read, inner_pack = field.read, field.pack

    def read(value: Any) -> Any:
        return None if value is None else inner_read(value)

    return Field(read, None if inner_pack is None else lambda value: None if value is None else inner_pack(value))


INTEGER: Final = _integer()
SIZE: Final = _integer(SIZE_MAX)
U64: Final = _integer(2**64 - 1)
TOKENS: Final = _integer(TOKENS_MAX)
FLAG: Final = _field(lambda value: type(value) is bool, "true or false is needed")
SECONDS: Final = _field(
    lambda value: type(value) in (int, float) and 0 <= value <= TIMEOUT_S_MAX,
    f"seconds of 0 .. {TIMEOUT_S_MAX:g} are needed",
    float,
)
TEXT: Final = _field(
    lambda value: type(value) is str and len(value) <= NAME_CHARS_MAX, f"text of at most {NAME_CHARS_MAX} characters is needed"
)
KEY: Final = _field(_is_key, f"a key of {KEY_BYTES} bytes is needed")
PARENT: Final = _optional(KEY)
KEYS: Final = _field(_are_keys, f"1 .. {KEYS_MAX} keys that differ are needed", tuple)
META: Final = _field(
    lambda value: type(value) is bytes and len(value) <= META_BYTES_MAX, f"at most {META_BYTES_MAX} bytes are needed"
)
PEERS: Final = Field(
    _field(
        _are_peers, f"at most {SOURCES_MAX} of [node id, tcp://host:port] are needed", lambda v: tuple(m.Peer(*p) for p in v)
    ).read,
    lambda peers: [[p.node_id, p.endpoint] for p in peers],
)
SLOTS: Final = _field(_are_slots, "a list of slots is needed", tuple)
MISS: Final = _optional(_one_of(m.Miss))
CODE: Final = _one_of(m.ErrorCode)

LEASES: Final = _field(_are_leases, f"1 .. {KEYS_MAX} leases are needed", tuple)
ROWS: Final = _field(lambda value: type(value) is bytes, "bytes are needed")
METAS: Final = _field(_are_metas, f"at most {GRANTS_MAX} of at most {META_BYTES_MAX} bytes are needed", tuple)
ASK: Final = {"ticket": INTEGER, "keys": KEYS, "wait": FLAG, "timeout_s": SECONDS}

TABLE: Final[dict[str, tuple[type[Any], dict[str, Field]]]] = {
    # requests
    "hello": (m.Hello, {}),
    "reserve": (
        m.Reserve,
        {"ticket": INTEGER, "keys": KEYS, "parent": PARENT, "timeout_s": SECONDS, "private": FLAG, "retention": TEXT},
    ),
    "commit": (
        m.Commit,
        {"slot": SIZE, "key": KEY, "parent": PARENT, "tokens": TOKENS, "length": SIZE, "checksum": U64, "meta": META},
    ),
    "abandon": (m.Abandon, {"slot": SIZE}),
    "acquire": (m.Acquire, ASK | {"sources": PEERS}),
    "pull": (m.Pull, ASK | {"credits": _integer(256)}),
    "cancel": (m.Cancel, {"ticket": INTEGER}),
    "release": (m.Release, {"leases": LEASES, "consume": FLAG}),
    "keepalive": (m.Keepalive, {}),
    "goodbye": (m.Goodbye, {}),
    # questions
    "snapshot": (m.AskSnapshot, {}),
    "events": (m.AskEvents, {"first": INTEGER}),
    # answers
    "welcome": (
        m.Welcome,
        {"node_id": TEXT, "slots": SIZE, "slot_bytes": SIZE, "client_dead_s": SECONDS},
    ),
    "alive": (m.Alive, {}),
    "reserved": (m.SlotsReserved, {"ticket": INTEGER, "slots": SLOTS}),
    "denied": (m.ReserveDenied, {"ticket": INTEGER, "reason": TEXT}),
    "granted": (
        m.Granted,
        {
            "ticket": INTEGER,
            "position": INTEGER,
            "lease": INTEGER,
            "rows": ROWS,
            "tiers": ROWS,
            "metas": METAS,
            "ended": FLAG,
        },
    ),
    "piece": (m.Piece, {"ticket": INTEGER, "lease": INTEGER, "offset": SIZE}),
    "stalled": (m.Stalled, {"ticket": INTEGER}),
    "ended": (m.Ended, {"ticket": INTEGER, "available": INTEGER, "miss": MISS}),
    "error": (m.Refusal, {"code": CODE}),
}
OPS: Final[dict[type[Any], str]] = {kind: op for op, (kind, _) in TABLE.items()}
REQUESTS: Final = frozenset(
    {"hello", "reserve", "commit", "abandon", "acquire", "pull", "cancel", "release", "keepalive", "goodbye"}
)
QUESTIONS: Final = frozenset({"snapshot", "events"})
ANSWERS: Final = frozenset(TABLE) - REQUESTS - QUESTIONS


def encode(message: Message, incarnation: str) -> bytes:
    """The frame that :func:`decode` reads back."""
    op = OPS[type(message)]
    fields: dict[str, Any] = {"op": op, "inc": incarnation}
    for name, field in TABLE[op][1].items():
        value = getattr(message, name)
        fields[name] = value if field.pack is None else field.pack(value)
    return cast(bytes, msgpack.packb(fields))


def decode(frame: bytes | memoryview, ops: frozenset[str]) -> tuple[Message, str]:
    """The message in ``frame``, one of ``ops``, and the incarnation it names."""
    fields = unpack_map(frame)
    op, incarnation = fields.pop("op", None), fields.pop("inc", None)
    if not isinstance(op, str) or op not in ops:
        raise MalformedMessageError("op: unknown")
    if not isinstance(incarnation, str) or len(incarnation) > NAME_CHARS_MAX:
        raise MalformedMessageError("inc: text is needed")
    kind, table = TABLE[op]
    if fields.keys() != table.keys():
        raise MalformedMessageError(f"{op}: exactly its own fields are needed")
    values: list[Any] = []
    for name, field in table.items():
        try:
            values.append(field.read(fields[name]))
        except ValueError as error:
            raise MalformedMessageError(f"{op}.{name}: {error}") from None
    message = kind(*values)
    if kind is m.Granted:
        try:
            _check_granted(message)
        except ValueError as error:
            raise MalformedMessageError(f"{op}: {error}") from None
    return message, incarnation


def unpack_map(frame: bytes | memoryview) -> dict[Any, Any]:
    """The msgpack map in ``frame``, its values unchecked."""
    if len(frame) > HEADER_BYTES_MAX:
        raise MalformedMessageError(f"a message of {len(frame)} bytes is over the limit of {HEADER_BYTES_MAX}")
    try:
        message = msgpack.unpackb(frame)  # its own limits follow from the frame's length
    except Exception as error:
        raise MalformedMessageError(f"not msgpack ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise MalformedMessageError("a map is needed")
    return message
