"""What clients (workers, and other nodes) ask of a node, and what it answers. Checked by ``transport/codec.py`` before it gets
here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kv_pool.keys import BlockKey


class Miss(StrEnum):
    """Why an acquire did not get all it asked for."""

    NOT_FOUND = "not_found"
    LATE = "late"
    REFUSED = "refused"
    CORRUPT = "corrupt"
    LOST = "lost"


class ErrorCode(StrEnum):
    """Why a request was not carried out. All but the last two mean that the client must say hello again."""

    MALFORMED = "malformed"
    STALE_INCARNATION = "stale_incarnation"
    UNKNOWN_CLIENT = "unknown_client"
    TOO_MANY_CLIENTS = "too_many_clients"
    REPLAYED = "replayed"
    NOT_RESERVED = "not_reserved"
    """A commit or abandon of a slot that is not this client's (any more): the block is simply not there."""
    BAD_COMMIT = "bad_commit"
    """A commit whose length or token count cannot be; the slot was taken back."""


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
    """Slots to write ``keys`` into, all or none; waits for room up to ``timeout_s``. The keys follow each other in one chain, the
    first one follows ``parent`` (None: unknown); while they are written, what they follow is not evicted."""

    ticket: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    timeout_s: float
    private: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """The slot now holds ``length`` bytes with this checksum (XXH3-64): make ``key`` visible. A tail has fewer ``tokens`` than a
    block."""

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
    """Lease the longest prefix of ``keys``, from here or from ``source``; with ``wait`` also what is not committed yet."""

    ticket: int
    keys: tuple[BlockKey, ...]
    wait: bool
    timeout_s: float
    source: Peer | None


@dataclass(frozen=True, slots=True)
class Pull:
    """An acquire of another node: the bytes travel with each grant. At most ``credits`` blocks are on the way to one client at a
    time; a :class:`Release` returns a credit."""

    ticket: int
    keys: tuple[BlockKey, ...]
    wait: bool
    timeout_s: float
    credits: int


@dataclass(frozen=True, slots=True)
class Cancel:
    ticket: int


@dataclass(frozen=True, slots=True)
class Release:
    lease: int
    consume: bool


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Renews all leases and reservations of the client."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    pass


Request = Hello | Reserve | Commit | Abandon | Acquire | Pull | Cancel | Release | Keepalive | Goodbye


# --- questions of those who are no clients -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Which public blocks are there?"""


@dataclass(frozen=True, slots=True)
class AskEvents:
    """The event batches from ``first`` on, once more."""

    first: int


Question = AskSnapshot | AskEvents


# --- answers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """``pid`` and ``fd`` say where to map the arena."""

    node_id: str
    pid: int
    fd: int
    slots: int
    slot_bytes: int
    client_dead_s: float


@dataclass(frozen=True, slots=True)
class Alive:
    pass


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """Per key its slot, or None where the pool has the block or another writer brings it."""

    ticket: int
    slots: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ReserveDenied:
    ticket: int
    reason: str


class Grant(NamedTuple):
    """One leased block: where it lies and what its bytes must be. ``remote``: it came from another node for this acquire."""

    key: BlockKey
    parent: BlockKey | None
    lease: int
    slot: int
    epoch: int
    tokens: int
    length: int
    checksum: int
    meta: bytes
    private: bool
    remote: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks ``position``, ``position + 1`` ... of an acquire. The answer to a :class:`Pull` has one, its first bytes follow."""

    ticket: int
    position: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes from ``offset`` on of the block that was granted last for a pull."""

    ticket: int
    lease: int
    offset: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """The pull waits for its next key, which nobody has committed yet."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Last answer to an acquire or pull: its first ``available`` keys were granted; ``miss`` says why not all."""

    ticket: int
    available: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode


Answer = Welcome | Alive | SlotsReserved | ReserveDenied | Granted | Piece | Stalled | Ended | Refusal
