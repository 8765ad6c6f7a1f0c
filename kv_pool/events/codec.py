"""KV events on the wire: vLLM's three frames, so that its readers can follow ours.

``[topic, sequence as 8 bytes big-endian, msgpack([ts, [event, ...], rank])]``; an event is a tagged array:
``["BlockStored", [key, ...], parent, [], block_tokens, None, medium]``, ``["BlockRemoved", [key, ...], medium]``,
``["AllBlocksCleared"]``. The topic is ``kv@<node id>@<incarnation>``. Token ids are not sent: keys say enough, and prompts
stay private.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, cast

import msgpack

from kv_pool.events.types import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import KEY_BYTES, BlockKey

TOPIC_PREFIX: Final = b"kv@"
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024


class MalformedEventError(ValueError):
    """Not an event batch of this protocol."""


def encode_batch(batch: EventBatch) -> list[bytes]:
    events = [_pack(event) for event in batch.events]
    topic = b"%s%s@%s" % (TOPIC_PREFIX, batch.node_id.encode(), batch.incarnation.encode())
    return [topic, struct.pack(">Q", batch.sequence), cast(bytes, msgpack.packb([batch.ts, events, 0]))]


def decode_batch(frames: Sequence[bytes]) -> EventBatch:
    """Inverse of :func:`encode_batch`; raises :class:`MalformedEventError` on anything else."""
    try:
        topic, sequence, payload = frames
        if not topic.startswith(TOPIC_PREFIX) or len(payload) > BATCH_BYTES_MAX:
            raise MalformedEventError("topic or size")
        node_id, incarnation = topic[len(TOPIC_PREFIX) :].decode().rsplit("@", 1)
        ts, events, _rank = msgpack.unpackb(payload)
        return EventBatch(struct.unpack(">Q", sequence)[0], node_id, incarnation, float(ts), tuple(_unpack(e) for e in events))
    except MalformedEventError:
        raise
    except Exception as error:
        raise MalformedEventError(f"malformed event batch: {type(error).__name__}") from error


def _pack(event: BlockEvent) -> list[Any]:
    match event:
        case BlockStored():
            return ["BlockStored", list(event.keys), event.parent, [], event.block_tokens, None, event.medium]
        case BlockRemoved():
            return ["BlockRemoved", list(event.keys), event.medium]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def _unpack(row: list[Any]) -> BlockEvent:
    match row:
        case ["BlockStored", keys, parent, _, block_tokens, _, medium]:
            return BlockStored(_keys(keys), None if parent is None else _key(parent), int(block_tokens), str(medium))
        case ["BlockRemoved", keys, medium]:
            return BlockRemoved(_keys(keys), str(medium))
        case ["AllBlocksCleared"]:
            return AllBlocksCleared()
        case _:
            raise MalformedEventError("unknown event")


def _keys(values: list[Any]) -> tuple[BlockKey, ...]:
    return tuple(_key(value) for value in values)


def _key(value: object) -> BlockKey:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise MalformedEventError("bad key")
    return BlockKey(value)
