"""All public blocks of a node at once, for a reader that joins or has missed events."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import zmq

from kv_pool.events.codec import MalformedEventError
from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.transport.codec import encode
from kv_pool.transport.sockets import make_socket

SNAPSHOT_BYTES_MAX = 256 * 1024 * 1024


class SnapshotError(Exception):
    """The node did not give a snapshot in time."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything up to and including event batch ``sequence`` (-1: none yet). Keys by medium, parents before children."""

    node_id: str
    incarnation: str
    sequence: int
    keys_by_medium: dict[str, tuple[BlockKey, ...]]


def fetch_snapshot(endpoint: str, timeout_s: float) -> Snapshot:
    """Ask the node at ``endpoint`` (its control endpoint). Blocks at most ``timeout_s``; raises :class:`SnapshotError`."""
    context = zmq.Context()
    socket = make_socket(context, zmq.DEALER, bytes_max=SNAPSHOT_BYTES_MAX)
    try:
        socket.connect(endpoint)
        socket.send(encode({"op": "snapshot", "inc": ""}))
        if not socket.poll(int(timeout_s * 1000)):
            raise SnapshotError(f"{endpoint} gave no snapshot in {timeout_s:g} s")
        return _decode(socket.recv())
    except (zmq.ZMQError, MalformedEventError) as error:
        raise SnapshotError(f"{endpoint}: {error}") from error
    finally:
        socket.close(0)
        context.term()


def snapshot_message(snapshot: Snapshot) -> bytes:
    return encode(
        {
            "op": "snapshot",
            "node_id": snapshot.node_id,
            "inc": snapshot.incarnation,
            "sequence": snapshot.sequence,
            "keys": {medium: b"".join(keys) for medium, keys in snapshot.keys_by_medium.items()},
        }
    )


def _decode(frame: bytes) -> Snapshot:
    try:
        message = msgpack.unpackb(frame)
        keys = {str(medium): _split(run) for medium, run in message["keys"].items()}
        return Snapshot(str(message["node_id"]), str(message["inc"]), int(message["sequence"]), keys)
    except Exception as error:
        raise MalformedEventError(f"malformed snapshot: {type(error).__name__}") from error


def _split(run: bytes) -> tuple[BlockKey, ...]:
    if len(run) % KEY_BYTES:
        raise MalformedEventError("snapshot keys of odd length")
    return tuple(BlockKey(run[i : i + KEY_BYTES]) for i in range(0, len(run), KEY_BYTES))
