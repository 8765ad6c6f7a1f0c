"""A worker's side of its pool node: reserve slots and write, acquire blocks and read, straight in shared memory.

Owned by one thread. Orders return a ticket at once; what becomes of them comes out of :meth:`PoolClient.poll`. Nothing here
blocks but :meth:`PoolClient.connect` and :meth:`PoolClient.poll`, up to the timeouts they are given.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash
import zmq

from kv_pool.arena import Arena
from kv_pool.keys import BlockKey
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Cancel,
    Commit,
    Ended,
    ErrorCode,
    Goodbye,
    Grant,
    Hello,
    Keepalive,
    Miss,
    Peer,
    Refusal,
    Release,
    Request,
    Reserve,
    ReserveDenied,
    SlotsReserved,
    Welcome,
)
from kv_pool.node.messages import Granted as GrantedMessage
from kv_pool.transport import process
from kv_pool.transport.codec import ANSWERS, MalformedMessageError, decode, encode
from kv_pool.transport.sockets import make_socket

__all__ = [
    "AcquireEnded",
    "BlockSourceAddress",
    "ClientEvent",
    "Granted",
    "LeasedBlock",
    "Miss",
    "NodeInfo",
    "NodeLost",
    "PoolClient",
    "PoolUnavailableError",
    "ReserveRefused",
    "Reserved",
    "ReservedSlot",
]

GOODBYE_LINGER_MS: Final = 200
HARMLESS: Final = frozenset({ErrorCode.NOT_RESERVED, ErrorCode.BAD_COMMIT})
"""Refusals that concern one block: it is simply not there."""


class PoolUnavailableError(Exception):
    """The node cannot be used: it does not answer, or its slots do not fit the blocks."""


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
    where it was when it was asked for: "dram" here, or "remote"."""

    __slots__ = ("_arena", "_grant", "buffer", "key", "lease", "meta", "tier", "tokens")

    def __init__(self, arena: Arena, grant: Grant) -> None:
        self._arena = arena
        self._grant = grant
        self.key = grant.key
        self.tokens = grant.tokens
        self.meta = grant.meta
        self.lease = grant.lease
        self.tier = "remote" if grant.remote else "dram"
        self.buffer = arena.slot_read_only(grant.slot)[: grant.length]

    def still_held(self) -> bool:
        """The slot still is this block's. After a copy: the bytes copied were its own all the time."""
        return self._arena.epoch(self._grant.slot) == self._grant.epoch

    def verify(self) -> bool:
        """The bytes have the stored checksum and the slot still is this block's; anything else is a miss."""
        return xxhash.xxh3_64_intdigest(self.buffer) == self._grant.checksum and self.still_held()


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
    """Block ``position`` of an acquire, in order. The receiver releases ``block.lease``."""

    ticket: int
    position: int
    block: LeasedBlock


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


class PoolClient:
    """See the module docstring. ``block_bytes`` is what one block needs; ``client_id`` appears in messages to people only."""

    def __init__(self, endpoint: str, *, client_id: str, block_bytes: int) -> None:
        self._endpoint = endpoint
        self._client_id = client_id
        self._block_bytes = block_bytes
        self._context = zmq.Context()
        self._socket = make_socket(self._context, zmq.DEALER)
        self._socket.connect(endpoint)
        self._arena: Arena | None = None
        self._node_process: int | None = None
        self._process_poll = select.poll()
        self._incarnation = ""
        self._dead_after_s = 0.0
        self._heard_at = time.monotonic()
        self._lost: str | None = None
        self._closed = False
        self._next_ticket = 0
        self._reserving: dict[int, tuple[BlockKey, ...]] = {}

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For the owner's poller (POLLIN); nobody else receives from it."""
        return self._socket

    def connect(self, timeout_s: float) -> NodeInfo:
        """Say hello and map the arena. Raises :class:`PoolUnavailableError`; the client is closed then."""
        try:
            return self._connect(timeout_s)
        except (MalformedMessageError, OSError, ValueError) as error:
            self.close()
            raise PoolUnavailableError(f"pool node at {self._endpoint}: {error}") from error
        except PoolUnavailableError:
            self.close()
            raise

    def _connect(self, timeout_s: float) -> NodeInfo:
        own_pid, own_started = process.own()
        self._send(Hello(own_pid, own_started))
        if not self._socket.poll(int(timeout_s * 1000)):
            raise PoolUnavailableError(f"pool node at {self._endpoint} did not answer {self._client_id} in {timeout_s:g} s")
        answer, incarnation = decode(self._socket.recv(), ANSWERS)
        if not isinstance(answer, Welcome):
            raise PoolUnavailableError(f"pool node at {self._endpoint} refuses {self._client_id}: {answer}")
        if answer.slot_bytes < self._block_bytes:
            raise PoolUnavailableError(f"slots of {answer.slot_bytes} bytes cannot hold blocks of {self._block_bytes}")
        self._arena = Arena.attach(answer.pid, answer.fd, answer.slots, answer.slot_bytes)
        self._arena.start_prefault()
        self._node_process = process.watch(answer.pid, process.started(answer.pid))
        if self._node_process is not None:
            self._process_poll.register(self._node_process, select.POLLIN)
        self._dead_after_s = answer.client_dead_s
        self._incarnation = incarnation
        self._heard_at = time.monotonic()
        return NodeInfo(answer.node_id, incarnation, answer.slots, answer.slot_bytes)

    # --- writing ------------------------------------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[BlockKey], *, timeout_s: float, private: bool = False, parent: BlockKey | None = None
    ) -> int:
        """Slots for those of ``keys`` that the pool lacks, all or none; waits there for room up to ``timeout_s``.

        The keys follow each other in one chain. ``parent`` is what the first one follows: named, it stays in the pool meanwhile.
        """
        ticket = self._ticket()
        self._reserving[ticket] = tuple(keys)
        self._send(Reserve(ticket, tuple(keys), parent, timeout_s, private))
        return ticket

    def commit(self, slot: ReservedSlot, *, tokens: int, parent: BlockKey | None, meta: bytes = b"") -> None:
        """Make the slot's block visible: ``block_bytes`` of it (none where ``tokens`` is 0) under their checksum (XXH3-64)."""
        length = self._block_bytes if tokens else 0
        checksum = xxhash.xxh3_64_intdigest(slot.buffer[:length])
        self._send(Commit(slot.index, slot.key, parent, tokens, length, checksum, meta))

    def abandon(self, slot: ReservedSlot) -> None:
        """Give a reservation back unwritten."""
        self._send(Abandon(slot.index))

    # --- reading ------------------------------------------------------------------------------------------------------------

    def acquire(self, keys: Sequence[BlockKey], *, wait: bool, source: BlockSourceAddress | None, timeout_s: float) -> int:
        """Lease the longest prefix of ``keys`` that can be had here or from ``source``. With ``wait`` also wait, up to
        ``timeout_s``, for keys that nobody has committed yet."""
        ticket = self._ticket()
        peer = None if source is None else Peer(source.node_id, source.endpoint)
        self._send(Acquire(ticket, tuple(keys), wait, timeout_s, peer))
        return ticket

    def cancel(self, ticket: int) -> None:
        """No more grants are wanted. Leases already granted are the caller's to release."""
        self._send(Cancel(ticket))

    def release(self, lease: int, *, consume: bool = False) -> None:
        """End a lease; ``consume`` deletes a private block, which has one reader only."""
        self._send(Release(lease, consume))

    # --- housekeeping -------------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> list[ClientEvent]:
        """What has arrived, waiting up to ``timeout_s`` for the first of it."""
        events: list[ClientEvent] = []
        if timeout_s and self._lost is None:
            self._socket.poll(int(timeout_s * 1000))
        while self._lost is None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard_at = time.monotonic()
            try:
                events += self._read(frame)
            except (MalformedMessageError, IndexError) as error:
                self._lost = f"it sends what is not in the protocol ({type(error).__name__})"
        if self._lost is None:
            self._look_at_process()
        if self._lost is not None:
            events.append(NodeLost(self._lost))
        return events

    def keepalive(self) -> None:
        """About once a second: shows the node that we live, and notices when the node does not."""
        # What waits unread proves that it lives, however long we have not looked.
        silent = not self._socket.poll(0) and time.monotonic() - self._heard_at > self._dead_after_s
        if self._lost is None and silent:
            self._lost = f"silent for {self._dead_after_s:g} s"
        self._look_at_process()
        if self._lost is None:
            self._send(Keepalive())

    def close(self) -> None:
        """Give everything back and unmap. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._incarnation and self._lost is None:
            self._send(Goodbye())
        # The goodbye may leave: a node that never hears it takes everything back when this process falls silent.
        self._socket.close(linger=GOODBYE_LINGER_MS if self._lost is None else 0)
        self._context.term()
        if self._node_process is not None:
            os.close(self._node_process)
            self._node_process = None
        if self._arena is not None:
            self._arena.close()

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _send(self, request: Request) -> None:
        try:
            self._socket.send(encode(request, self._incarnation), zmq.NOBLOCK)
        except zmq.Again:
            self._lost = "it takes no more messages"

    def _look_at_process(self) -> None:
        if self._lost is None and self._node_process is not None and self._process_poll.poll(0):
            self._lost = "its process has ended"

    def _read(self, frame: bytes) -> list[ClientEvent]:
        """The events in one message. Raises MalformedMessageError, or IndexError for a slot that is not there."""
        assert self._arena is not None, "connect first"
        answer, incarnation = decode(frame, ANSWERS)
        if incarnation != self._incarnation:
            self._lost = "it has been replaced"
            return []
        match answer:
            case GrantedMessage(ticket, position, grants):
                return [Granted(ticket, position + i, LeasedBlock(self._arena, grant)) for i, grant in enumerate(grants)]
            case Ended(ticket, available, miss):
                return [AcquireEnded(ticket, available, miss)]
            case SlotsReserved(ticket, slots):
                return [self._reserved(ticket, slots)]
            case ReserveDenied(ticket, reason):
                self._reserving.pop(ticket, None)
                return [ReserveRefused(ticket, reason)]
            case Refusal(code) if code not in HARMLESS:
                self._lost = f"it answers {code}"
        return []

    def _reserved(self, ticket: int, slots: tuple[int | None, ...]) -> Reserved:
        assert self._arena is not None
        keys = self._reserving.pop(ticket, ())
        if len(keys) != len(slots):
            raise MalformedMessageError("slots: another number than asked for")
        arena = self._arena
        return Reserved(
            ticket,
            tuple(
                None if slot is None else ReservedSlot(key, slot, arena.slot(slot)) for key, slot in zip(keys, slots, strict=True)
            ),
        )
