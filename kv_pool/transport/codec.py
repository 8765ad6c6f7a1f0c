"""Messages between a node and its clients: msgpack maps, checked field by field before anything is done about them.

Client to node: one frame ``{"op": ..., "inc": the node's incarnation, ...}``. Node to client: one frame, or two where a
block's bytes
follow. Whatever does not fit the tables here is a :class:`MalformedMessageError`; nothing is allocated on its word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack

from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Cancel,
    Commit,
    Goodbye,
    Hello,
    Keepalive,
    Peer,
    Release,
    Request,
    Reserve,
)

KEYS_MAX: Final = 8192
META_BYTES_MAX: Final = 4096
NAME_CHARS_MAX: Final = 256
HEADER_BYTES_MAX: Final = 512 * 1024
TIMEOUT_S_MAX: Final = 24 * 3600.0


class MalformedMessageError(ValueError):
    """Not a message of this protocol. The text names the field, never its content."""


def encode(message: dict[str, Any]) -> bytes:
    return msgpack.packb(message)


def decode_map(frame: bytes | memoryview) -> dict[str, Any]:
    """One map with string keys and an ``op``."""
    if len(frame) > HEADER_BYTES_MAX:
        raise MalformedMessageError(f"a message of {len(frame)} bytes is over the limit of {HEADER_BYTES_MAX}")
    try:
        message = msgpack.unpackb(frame)
    except Exception as error:
        raise MalformedMessageError(f"not msgpack ({type(error).__name__})") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise MalformedMessageError("op: missing")
    return message


def decode_request(message: dict[str, Any]) -> Request:
    """The request that a decoded map stands for."""
    read = REQUESTS.get(message["op"])
    if read is None:
        raise MalformedMessageError("op: unknown")
    return read(message)


def _int(message: dict[str, Any], name: str, low: int = 0, high: int = 2**63 - 1) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise MalformedMessageError(f"{name}: an integer of {low} .. {high} is needed")
    return value


def _bool(message: dict[str, Any], name: str) -> bool:
    value = message.get(name)
    if not isinstance(value, bool):
        raise MalformedMessageError(f"{name}: true or false is needed")
    return value


def _seconds(message: dict[str, Any], name: str) -> float:
    value = message.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= TIMEOUT_S_MAX:
        raise MalformedMessageError(f"{name}: seconds of 0 .. {TIMEOUT_S_MAX:g} are needed")
    return float(value)


def _key(value: object, name: str) -> BlockKey:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise MalformedMessageError(f"{name}: a key of {KEY_BYTES} bytes is needed")
    return BlockKey(value)


def _keys(message: dict[str, Any]) -> tuple[BlockKey, ...]:
    value = message.get("keys")
    if not isinstance(value, list) or not 1 <= len(value) <= KEYS_MAX:
        raise MalformedMessageError(f"keys: 1 .. {KEYS_MAX} keys are needed")
    keys = tuple(_key(item, "keys") for item in value)
    if len(set(keys)) != len(keys):
        raise MalformedMessageError("keys: twice the same key")
    return keys


def _bytes(message: dict[str, Any], name: str, most: int) -> bytes:
    value = message.get(name)
    if not isinstance(value, bytes) or len(value) > most:
        raise MalformedMessageError(f"{name}: at most {most} bytes are needed")
    return value


def _source(message: dict[str, Any]) -> Peer | None:
    value = message.get("source")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, str) and len(v) <= NAME_CHARS_MAX for v in value):
        raise MalformedMessageError("source: [node id, endpoint] is needed")
    return Peer(*value)


def _acquire(message: dict[str, Any], *, payload: bool) -> Acquire:
    return Acquire(
        _int(message, "ticket"),
        _keys(message),
        _bool(message, "wait"),
        _seconds(message, "timeout_s"),
        None if payload else _source(message),
        payload,
    )


def _commit(message: dict[str, Any]) -> Commit:
    parent = message.get("parent")
    return Commit(
        _int(message, "slot"),
        _key(message.get("key"), "key"),
        None if parent is None else _key(parent, "parent"),
        _int(message, "tokens"),
        _int(message, "length"),
        _int(message, "checksum", 0, 2**64 - 1),
        _bytes(message, "meta", META_BYTES_MAX),
    )


REQUESTS: Final[dict[str, Callable[[dict[str, Any]], Request]]] = {
    "hello": lambda m: Hello(_int(m, "pid"), _int(m, "started")),
    "reserve": lambda m: Reserve(_int(m, "ticket"), _keys(m), _seconds(m, "timeout_s"), _bool(m, "private")),
    "commit": _commit,
    "abandon": lambda m: Abandon(_int(m, "slot")),
    "acquire": lambda m: _acquire(m, payload=False),
    "fetch": lambda m: _acquire(m, payload=True),
    "cancel": lambda m: Cancel(_int(m, "ticket")),
    "release": lambda m: Release(_int(m, "lease"), _bool(m, "consume")),
    "keepalive": lambda _: Keepalive(),
    "goodbye": lambda _: Goodbye(),
}


def to_wire(request: Request, incarnation: str) -> bytes:
    """The frame that :func:`decode_request` reads back."""
    op = OPS[type(request)]
    if isinstance(request, Acquire) and request.payload:
        op = "fetch"
    fields: dict[str, Any] = {name: getattr(request, name) for name in request.__dataclass_fields__}
    fields.pop("payload", None)
    if isinstance(request, Acquire):
        fields["source"] = None if request.source is None else [request.source.node_id, request.source.endpoint]
    return encode({"op": op, "inc": incarnation} | fields)


OPS: Final[dict[type, str]] = {
    Hello: "hello",
    Reserve: "reserve",
    Commit: "commit",
    Abandon: "abandon",
    Acquire: "acquire",
    Cancel: "cancel",
    Release: "release",
    Keepalive: "keepalive",
    Goodbye: "goodbye",
}
