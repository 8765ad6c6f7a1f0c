"""A worker's side of its pool node: reserve slots and write, acquire blocks and read, straight in shared memory.

Owned by one thread. Orders return a ticket at once; what becomes of them comes out of :meth:`PoolClient.poll`. Nothing here
blocks but :meth:`PoolClient.connect` and :meth:`PoolClient.poll`, up to the timeouts they are given.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from kv_pool.arena import Arena
from kv_pool.client_events import (
    AcquireEnded,
    BlockSourceAddress,
    ClientEvent,
    Granted,
    LeasedBlock,
    NodeInfo,
    NodeLost,
    Reserved,
    ReservedSlot,
    ReserveRefused,
    copy_and_digest,
)
from kv_pool.keys import BlockKey
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Cancel,
    Commit,
    Ended,
    ErrorCode,
    Goodbye,
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
    Tier,
    Welcome,
)
from kv_pool.node.messages import Granted as GrantedMessage
from kv_pool.transport.codec import ANSWERS, KEYS_MAX, MalformedMessageError, decode, encode
from kv_pool.transport.local import HungUpError, LocalConnection

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
    "Tier",
    "copy_and_digest",
]

SPIN_S: Final = 200e-6
"""After an order a waiting client looks this long for the answer before it sleeps: waking up costs about as much. Not while it
waits for something that takes its time, such as blocks of another node: those need the processor more."""
HARMLESS: Final = frozenset({ErrorCode.NOT_RESERVED, ErrorCode.BAD_COMMIT})
"""Refusals that concern one block: it is simply not there."""


class PoolUnavailableError(Exception):
    """The node cannot be used: it does not answer, or its slots do not fit the blocks."""


class PoolClient:
    """See the module docstring. ``block_bytes`` is what one block needs; ``client_id`` appears in messages to people only."""

    def __init__(self, endpoint: str, *, client_id: str, block_bytes: int) -> None:
        self._endpoint = endpoint
        self._client_id = client_id
        self._block_bytes = block_bytes
        self._connection: LocalConnection | None = None
        self._ready = select.poll()
        self._arena: Arena | None = None
        self._incarnation = ""
        self._dead_after_s = 0.0
        self._heard_at = time.monotonic()
        self._lost: str | None = None
        self._closed = False
        self._next_ticket = 0
        self._look_out_until = 0.0
        self._reserving: dict[int, tuple[BlockKey, ...]] = {}

    def fileno(self) -> int:
        """For the owner's poller: there is something to :meth:`poll` when it is readable. -1 before :meth:`connect`."""
        return -1 if self._connection is None else self._connection.fileno()

    def connect(self, timeout_s: float) -> NodeInfo:
        """Say hello and map the arena. Raises :class:`PoolUnavailableError`; the client is closed then."""
        try:
            return self._connect(timeout_s)
        except (MalformedMessageError, HungUpError, OSError, ValueError) as error:
            self.close()
            raise PoolUnavailableError(f"pool node at {self._endpoint}: {error}") from error
        except PoolUnavailableError:
            self.close()
            raise

    def _connect(self, timeout_s: float) -> NodeInfo:
        self._connection = LocalConnection.connect(self._endpoint)
        self._ready.register(self._connection, select.POLLIN)
        self._send(Hello())
        if self._lost is not None or not self._ready.poll(timeout_s * 1000):
            raise PoolUnavailableError(f"pool node at {self._endpoint} did not answer {self._client_id} in {timeout_s:g} s")
        received = self._connection.receive_with_descriptor()
        if received is None:
            raise PoolUnavailableError(f"pool node at {self._endpoint} did not answer {self._client_id}")
        frame, descriptor = received
        try:
            return self._welcomed(frame, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _welcomed(self, frame: bytes, descriptor: int | None) -> NodeInfo:
        answer, incarnation = decode(frame, ANSWERS)
        if not isinstance(answer, Welcome) or descriptor is None:
            raise PoolUnavailableError(f"pool node at {self._endpoint} refuses {self._client_id}: {answer}")
        if answer.slot_bytes < self._block_bytes:
            raise PoolUnavailableError(f"slots of {answer.slot_bytes} bytes cannot hold blocks of {self._block_bytes}")
        self._arena = Arena.attach(descriptor, answer.slots, answer.slot_bytes)
        self._arena.start_prefault()
        self._dead_after_s = answer.client_dead_s
        self._incarnation = incarnation
        self._heard_at = time.monotonic()
        return NodeInfo(answer.node_id, incarnation, answer.slots, answer.slot_bytes)

    # --- writing ------------------------------------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float,
        private: bool = False,
        parent: BlockKey | None = None,
        retention: str = "",
    ) -> int:
        """Slots for those of ``keys`` that the pool lacks, all or none; waits there for room up to ``timeout_s``.

        The keys follow each other in one chain. ``parent`` is what the first one follows: named, it stays in the pool meanwhile.
        ``retention`` names the blocks' retention class; the first one configured unless given.
        """
        ticket = self._ticket()
        self._reserving[ticket] = tuple(keys)
        self._send(Reserve(ticket, tuple(keys), parent, timeout_s, private, retention))
        return ticket

    def commit(
        self, slot: ReservedSlot, *, tokens: int, parent: BlockKey | None, meta: bytes = b"", checksum: int | None = None
    ) -> None:
        """Make the slot's block visible: ``block_bytes`` of it (none where ``tokens`` is 0) under their checksum (XXH3-64), which
        the caller may know already (:func:`copy_and_digest`)."""
        length = self._block_bytes if tokens else 0
        if checksum is None or not length:
            checksum = xxhash.xxh3_64_intdigest(slot.buffer[:length])
        self._send(Commit(slot.index, slot.key, parent, tokens, length, checksum, meta))

    def abandon(self, slot: ReservedSlot) -> None:
        """Give a reservation back unwritten."""
        self._send(Abandon(slot.index))

    # --- reading ------------------------------------------------------------------------------------------------------------

    def acquire(
        self, keys: Sequence[BlockKey], *, wait: bool, timeout_s: float, sources: Sequence[BlockSourceAddress] = ()
    ) -> int:
        """Lease the longest prefix of ``keys`` that can be had within ``timeout_s``: from this node's DRAM or SSD or, what it
        lacks, from the first of ``sources`` (other nodes) that has it. With ``wait`` also wait for keys that nobody has
        committed yet."""
        ticket = self._ticket()
        peers = tuple(Peer(source.node_id, source.endpoint) for source in sources)
        self._send(Acquire(ticket, tuple(keys), wait, timeout_s, peers))
        return ticket

    def cancel(self, ticket: int) -> None:
        """No more grants are wanted. Leases already granted are the caller's to release. No :class:`AcquireEnded` follows, unless
        the acquire had ended before the node heard of this."""
        self._send(Cancel(ticket))

    def release(self, leases: Iterable[int], *, consume: bool = False) -> None:
        """End leases, all with one message; ``consume`` deletes those of the blocks that are private, which have one reader
        only."""
        numbers = tuple(leases)
        for start in range(0, len(numbers), KEYS_MAX):
            self._send(Release(numbers[start : start + KEYS_MAX], consume))

    # --- housekeeping -------------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> list[ClientEvent]:
        """What has arrived, waiting up to ``timeout_s`` for the first of it."""
        events: list[ClientEvent] = []
        if self._connection is None:
            self._lost = self._lost or "not connected"
        elif timeout_s and self._lost is None:
            self._wait(timeout_s)
        while self._lost is None and self._connection is not None:
            try:
                frame = self._connection.receive()
                if frame is None:
                    break
                self._heard_at = time.monotonic()
                events += self._read(frame)
            except HungUpError as error:
                self._lost = str(error)
            except (MalformedMessageError, IndexError) as error:
                self._lost = f"it sends what is not in the protocol ({type(error).__name__})"
        if self._lost is None and self._connection is not None and self._connection.backlogged:
            self._flush()
        if self._lost is not None:
            events.append(NodeLost(self._lost))
        return events

    def keepalive(self) -> None:
        """About once a second: shows the node that we live, and notices when the node does not."""
        # What waits unread proves that it lives, however long we have not looked.
        silent = not self._ready.poll(0) and time.monotonic() - self._heard_at > self._dead_after_s
        if self._lost is None and silent:
            self._lost = f"silent for {self._dead_after_s:g} s"
        if self._lost is None:
            self._flush()
            self._send(Keepalive())

    def close(self) -> None:
        """Give everything back and unmap. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._incarnation:
            self._lost = None  # also to a node that we gave up: nothing of ours writes to its slots any more
            self._send(Goodbye())
        self._lost = "closed"
        if self._connection is not None:
            self._connection.close()
        if self._arena is not None:
            self._arena.close()

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _wait(self, timeout_s: float) -> None:
        """Until something has arrived: a short look-out first, then asleep."""
        while not self._ready.poll(0):
            if time.perf_counter() >= self._look_out_until:
                self._ready.poll(timeout_s * 1000)
                return

    def _send(self, request: Request) -> None:
        if self._connection is None or self._lost is not None:
            return
        try:
            self._connection.send(encode(request, self._incarnation))
            self._look_out_until = time.perf_counter() + SPIN_S
        except HungUpError as error:
            self._lost = str(error)

    def _flush(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.flush()
        except HungUpError as error:
            self._lost = str(error)

    def _read(self, frame: memoryview) -> list[ClientEvent]:
        """The events in one message. Raises MalformedMessageError, or IndexError for a slot that is not there."""
        assert self._arena is not None, "connect first"
        answer, incarnation = decode(frame, ANSWERS)
        if incarnation != self._incarnation:
            self._lost = "it has been replaced"
            return []
        match answer:
            case GrantedMessage(ticket, position):
                arena = self._arena
                blocks = tuple([LeasedBlock(arena, answer, index) for index in range(answer.count)])
                granted = Granted(ticket, position, blocks)
                return [granted, AcquireEnded(ticket, position + len(blocks), None)] if answer.ended else [granted]
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
