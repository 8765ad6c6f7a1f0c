"""All public blocks of a node at once, for a reader that joins or has missed events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import msgpack

from kv_pool.events.question import NoAnswerError, ask
from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.node.messages import AskSnapshot
from kv_pool.transport.curve import CurveKeys

SNAPSHOT_BYTES_MAX: Final = 256 * 1024 * 1024


class SnapshotError(Exception):
    """The node did not give a snapshot in time."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything up to and including event batch ``sequence`` (-1: none yet). Keys by medium, in order of commit."""

    node_id: str
    incarnation: str
    sequence: int
    keys_by_medium: dict[str, tuple[BlockKey, ...]]


def fetch_snapshot(endpoint: str, timeout_s: float, keys: CurveKeys | None = None) -> Snapshot:
    """Ask the node at ``endpoint`` (its control endpoint). Blocks at most ``timeout_s``; raises :class:`SnapshotError`."""
    try:
        return _decode(ask(endpoint, AskSnapshot(), timeout_s, bytes_max=SNAPSHOT_BYTES_MAX, keys=keys)[0])
    except (NoAnswerError, ValueError) as error:
        raise SnapshotError(f"{endpoint}: no snapshot: {error}") from error


def encode_snapshot(snapshot: Snapshot) -> bytes:
    message = {
        "op": "snapshot",
        "node_id": snapshot.node_id,
        "inc": snapshot.incarnation,
        "sequence": snapshot.sequence,
        "keys": {medium: b"".join(keys) for medium, keys in snapshot.keys_by_medium.items()},
    }
    return cast(bytes, msgpack.packb(message))


def _decode(frame: bytes) -> Snapshot:
    """Raises ValueError."""
    try:
        message: dict[str, Any] = msgpack.unpackb(frame)
        keys = {str(medium): _split(run) for medium, run in message["keys"].items()}
        return Snapshot(str(message["node_id"]), str(message["inc"]), int(message["sequence"]), keys)
    except Exception as error:
        raise ValueError(f"malformed ({type(error).__name__})") from error


def _split(run: bytes) -> tuple[BlockKey, ...]:
    if len(run) % KEY_BYTES:
        raise ValueError("keys of odd length")
    return tuple(BlockKey(run[i : i + KEY_BYTES]) for i in range(0, len(run), KEY_BYTES))
