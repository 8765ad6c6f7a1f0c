"""What a worker gets from its pool client: slots to write, leased blocks to read, and what became of its orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

from kv_pool.arena import Arena
from kv_pool.keys import BlockKey
from kv_pool.node.messages import Grant, Miss, Tier
from kv_pool.node.messages import Granted as GrantedMessage

COPY_BYTES: Final = 1024 * 1024
"""Copied and digested at a time: the digest then reads from the processor's cache, not from memory."""


class BlockSourceAddress(Protocol):
    """Another node, as the scheduler names it."""

    @property
    def node_id(self) -> str: ...
    @property
    def endpoint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class NodeInfo:
    node_id: str
    incarnation: str
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class ReservedSlot:
    """A slot that is ours to write until it is committed or abandoned. ``buffer`` has ``slot_bytes`` bytes, writable."""

    key: BlockKey
    index: int
    buffer: memoryview


class LeasedBlock:
    """A committed block that stays while its lease lasts. ``buffer`` is read-only and as long as what was stored. ``tier`` says
    where it was when it was asked for."""

    __slots__ = ("_arena", "_granted", "_index", "_read")

    def __init__(self, arena: Arena, granted: GrantedMessage, index: int) -> None:
        self._arena = arena
        self._granted = granted
        self._index = index
        self._read: Grant | None = None

    @property
    def _grant(self) -> Grant:
        """Read when it is asked for: most of a long chain's time would go into this otherwise."""
        if self._read is None:
            self._read = self._granted.grant(self._index)
        return self._read

    @property
    def key(self) -> BlockKey:
        return self._grant.key

    @property
    def tokens(self) -> int:
        return self._grant.tokens

    @property
    def meta(self) -> bytes:
        return self._grant.meta

    @property
    def lease(self) -> int:
        return self._granted.lease + self._index

    @property
    def tier(self) -> Tier:
        return self._grant.tier

    @property
    def buffer(self) -> memoryview:
        """Raises IndexError where the node has named a slot that is not there."""
        return self._arena.slot_read_only(self._grant.slot)[: self._grant.length]

    def still_held(self) -> bool:
        """The slot still is this block's. After a copy: the bytes copied were its own all the time."""
        return self._arena.epoch(self._grant.slot) == self._grant.epoch

    def verify(self) -> bool:
        """The bytes have the stored checksum and the slot still is this block's; anything else is a miss."""
        return xxhash.xxh3_64_intdigest(self.buffer) == self._grant.checksum and self.still_held()

    def copy_to(self, target: memoryview) -> bool:
        """Copy the block's bytes, and check on the way what :meth:`verify` checks; False is a miss, whatever ``target`` holds
        then. Raises ValueError where ``target`` is shorter than the block."""
        digest = copy_and_digest(self.buffer, target)
        return digest == self._grant.checksum and self.still_held()


def copy_and_digest(source: memoryview, target: memoryview) -> int:
    """Copy ``source`` (bytes) into as many first bytes of ``target``; returns their XXH3-64."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), COPY_BYTES):
        piece = target[start : min(start + COPY_BYTES, len(source))]
        piece[:] = source[start : start + COPY_BYTES]
        digest.update(piece)
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class Reserved:
    """Per key a slot to write, or None where the pool has the block or another writer brings it."""

    ticket: int
    slots: tuple[ReservedSlot | None, ...]


@dataclass(frozen=True, slots=True)
class ReserveRefused:
    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks ``position``, ``position + 1`` ... of an acquire, in order. The receiver releases each one's ``lease``."""

    ticket: int
    position: int
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class AcquireEnded:
    """Last event of an acquire: its first ``available`` keys were granted; ``miss`` says why not all."""

    ticket: int
    available: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class NodeLost:
    """All tickets, leases and reservations of this client are void: touch no buffer, close it and connect anew. Said by every
    later poll too."""

    reason: str


ClientEvent = Reserved | ReserveRefused | Granted | AcquireEnded | NodeLost
