"""What clients (workers, and other nodes) ask of a node, and what it answers. Checked by ``transport/codec.py`` before it gets
here."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from kv_pool.keys import BlockKey


class Tier(IntEnum):
    """Where a block was when it was asked for. Everything is granted from DRAM in the end."""

    DRAM = 0
    SSD = 1
    REMOTE_DRAM = 2
    REMOTE_SSD = 3

    @property
    def remote(self) -> Tier:
        """The same, seen from another node."""
        return Tier.REMOTE_DRAM if self in (Tier.DRAM, Tier.REMOTE_DRAM) else Tier.REMOTE_SSD


class Miss(StrEnum):
    """Why an acquire did not get all it asked for."""

    NOT_FOUND = "not_found"
    EXPIRED = "expired"
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


TIERS: Final = tuple(Tier)
"""By number."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another pool node."""

    node_id: str
    endpoint: str


# --- requests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a client. Nothing of it travels: the node's shell asks the kernel who a client of this machine is
    (``pid``, ``started`` in kernel clock ticks); 0 elsewhere."""

    pid: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Slots to write ``keys`` into, all or none; waits for room up to ``timeout_s``. The keys follow each other in one chain, the
    first one follows ``parent`` (None: unknown); while they are written, what they follow is not evicted. ``retention`` names the
    retention class; empty: the first one."""

    ticket: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    timeout_s: float
    private: bool
    retention: str = ""


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
    """Lease the longest prefix of ``keys`` that can be had from this node's tiers or, key by key, from the first of ``sources``
    that has it; with ``wait`` also what is not committed yet."""

    ticket: int
    keys: tuple[BlockKey, ...]
    wait: bool
    timeout_s: float
    sources: tuple[Peer, ...]


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
    """Ends leases; ``consume`` deletes those of the blocks that are private."""

    leases: tuple[int, ...]
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
    """A client of the same machine gets the arena's descriptor beside it."""

    node_id: str
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
    """One leased block: where it lies and what its bytes must be."""

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
    tier: Tier
    retention: int = 0


GRANT_ROW: Final = struct.Struct("<16s16sQQIQQBB")
"""key, parent (zero where there is none), slot, epoch, tokens, length, checksum, flags, number of the retention class."""
HAS_PARENT: Final = 1
PRIVATE: Final = 2


def grant_row(
    key: BlockKey, parent: BlockKey | None, slot: int, epoch: int, tokens: int, length: int, checksum: int, *, private: bool,
    retention: int = 0,
) -> bytes:  # fmt: skip
    """What a grant of this block always says. Made once, when the block is committed: a chain of 32 is then granted in
    microseconds."""
    flags = (HAS_PARENT if parent is not None else 0) | (PRIVATE if private else 0)
    return GRANT_ROW.pack(key, parent or b"", slot, epoch, tokens, length, checksum, flags, retention)


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks ``position``, ``position + 1`` ... of an acquire, under leases ``lease``, ``lease + 1`` ... The answer to a
    :class:`Pull` has one, its bytes follow. ``rows`` has one :data:`GRANT_ROW` a block, ``tiers`` one :class:`Tier`; ``metas`` is
    empty where no block has any. ``ended``: all of the acquire's keys are granted, nothing follows."""

    ticket: int
    position: int
    lease: int
    rows: bytes
    tiers: bytes
    metas: tuple[bytes, ...] = ()
    ended: bool = False

    @property
    def count(self) -> int:
        return len(self.tiers)

    def grant(self, index: int) -> Grant:
        """One of the rows, read. They fit each other: the codec has seen to that."""
        key, parent, slot, epoch, tokens, length, checksum, flags, retention = GRANT_ROW.unpack_from(
            self.rows, index * GRANT_ROW.size
        )
        return Grant(
            BlockKey(key), BlockKey(parent) if flags & HAS_PARENT else None, self.lease + index, slot, epoch, tokens, length,
            checksum, self.metas[index] if self.metas else b"", bool(flags & PRIVATE), TIERS[self.tiers[index]],
            retention,
        )  # fmt: skip

    def grants(self) -> list[Grant]:
        return [self.grant(index) for index in range(len(self.tiers))]


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
    """Last answer to an acquire or pull that was not granted whole in its last :class:`Granted`: its first ``available`` keys
    were granted; ``miss`` says why not all."""

    ticket: int
    available: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode


Answer = Welcome | Alive | SlotsReserved | ReserveDenied | Granted | Piece | Stalled | Ended | Refusal
