"""The latest event batches once more, for a reader that has missed a few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_pool.events.codec import BATCH_BYTES_MAX, MalformedEventError, decode_batch
from kv_pool.events.question import NoAnswerError, ask
from kv_pool.events.types import EventBatch
from kv_pool.node.messages import AskEvents
from kv_pool.transport.curve import CurveKeys

FRAMES_PER_BATCH: Final = 3
GONE: Final = b"gone"
HERE: Final = b"here"


class EventsGoneError(Exception):
    """The node keeps these batches no longer, or does not answer: take a snapshot."""


def fetch_events(endpoint: str, first: int, timeout_s: float, keys: CurveKeys | None = None) -> list[EventBatch]:
    """Batch ``first`` and all later ones of the node at ``endpoint`` (its control endpoint). Blocks at most ``timeout_s``; raises
    :class:`EventsGoneError`."""
    try:
        status, *frames = ask(endpoint, AskEvents(first), timeout_s, bytes_max=BATCH_BYTES_MAX, keys=keys)
        if status != HERE or len(frames) % FRAMES_PER_BATCH:
            raise EventsGoneError(f"{endpoint}: batch {first} is not kept")
        return [decode_batch(frames[i : i + FRAMES_PER_BATCH]) for i in range(0, len(frames), FRAMES_PER_BATCH)]
    except (NoAnswerError, MalformedEventError) as error:
        raise EventsGoneError(f"{endpoint}: no replay: {error}") from error


def encode_replay(batches: Sequence[Sequence[bytes]] | None) -> list[bytes]:
    """The frames of an answer; None where the batches are gone."""
    if batches is None:
        return [GONE]
    return [HERE, *(frame for batch in batches for frame in batch)]
