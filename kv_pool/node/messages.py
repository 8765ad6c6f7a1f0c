"""What clients (workers, and other nodes) ask of a node, already checked; and what the node's state wants done about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kv_pool.events.types import BlockEvent
from kv_pool.keys import BlockKey


class Miss(StrEnum):
    """Why an acquire did not get all it asked for."""

    NOT_FOUND = "not_found"
    LATE = "late"
    REFUSED = "refused"
    CORRUPT = "corrupt"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another pool node."""

    node_id: str
    endpoint: str


# --- requests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a client. ``pid`` and ``started`` (kernel clock ticks) identify its process on this machine; 0
    elsewhere."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Slots to write ``keys`` into, all or none; waits for room until ``timeout_s``."""

    ticket: int
    keys: tuple[BlockKey, ...]
    timeout_s: float
    private: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """The slot now holds ``length`` bytes with this checksum: make ``key`` visible. ``tokens`` may be fewer than a block's (a
    tail)."""

    slot: int
    key: BlockKey
    parent: BlockKey | None
    tokens: int
    length: int
    checksum: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Abandon:
    slot: int


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lease the longest prefix of ``keys``, from here or from ``source``; with ``wait`` also what is not committed yet.
    ``payload``: the
    asker is another node, the bytes travel with the grant."""

    ticket: int
    keys: tuple[BlockKey, ...]
    wait: bool
    timeout_s: float
    source: Peer | None = None
    payload: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    ticket: int


@dataclass(frozen=True, slots=True)
class Release:
    lease: int
    consume: bool


@dataclass(frozen=True, slots=True)
class Keepalive:
    pass


@dataclass(frozen=True, slots=True)
class Goodbye:
    pass


Request = Hello | Reserve | Commit | Abandon | Acquire | Cancel | Release | Keepalive | Goodbye


# --- actions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """One message to a client."""

    client: str
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SendBlock:
    """A message with the slot's first ``length`` bytes behind it; the lease ends when they have left."""

    client: str
    message: dict[str, Any]
    slot: int
    length: int
    lease: int


@dataclass(frozen=True, slots=True)
class Publish:
    """A KV event for the scheduler's index."""

    event: BlockEvent


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Ask ``peer`` for ``keys``; answer with ``fetched`` for each block and ``fetch_ended``."""

    fetch: int
    peer: Peer
    keys: tuple[BlockKey, ...]
    wait: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelFetch:
    fetch: int
    peer: Peer


@dataclass(frozen=True, slots=True)
class SetEpoch:
    """The slot has another owner from now on."""

    slot: int
    epoch: int


Action = Send | SendBlock | Publish | StartFetch | CancelFetch | SetEpoch
