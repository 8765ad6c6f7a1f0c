"""A worker's side of its pool node: reserve slots and write, acquire blocks and read, straight in shared memory.

Owned by one thread. Orders return a ticket at once; what becomes of them comes out of :meth:`PoolClient.poll`. Nothing here
blocks but
:meth:`PoolClient.connect`, up to its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash
import zmq

from kv_pool.arena import Arena
from kv_pool.keys import BlockKey
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Cancel,
    Commit,
    Goodbye,
    Hello,
    Keepalive,
    Miss,
    Peer,
    Release,
    Request,
    Reserve,
)
from kv_pool.transport import process
from kv_pool.transport.codec import MalformedMessageError, decode_map, to_wire
from kv_pool.transport.sockets import make_socket

__all__ = [
    "AcquireEnded",
    "ClientEvent",
    "Granted",
    "LeasedBlock",
    "Miss",
    "NodeLost",
    "PoolClient",
    "PoolUnavailableError",
    "ReserveRefused",
    "Reserved",
    "ReservedSlot",
]


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
    """A committed block that stays while its lease lasts. ``buffer`` is read-only and as long as what was stored."""

    __slots__ = ("_arena", "_checksum", "_epoch", "_slot", "buffer", "key", "lease", "meta", "tier", "tokens")

    def __init__(self, arena: Arena, row: dict[str, Any]) -> None:
        self._arena = arena
        self._slot: int = row["slot"]
        self._epoch: int = row["epoch"]
        self._checksum: int = row["checksum"]
        self.key = BlockKey(row["key"])
        self.tokens: int = row["tokens"]
        self.meta: bytes = row["meta"]
        self.lease: int = row["lease"]
        self.tier = "remote" if row["remote"] else "dram"
        self.buffer = arena.slot_read_only(self._slot)[: row["length"]]

    def still_held(self) -> bool:
        """The slot still is this block's. After a copy: the bytes copied were its own all the time."""
        return self._arena.epoch(self._slot) == self._epoch

    def verify(self) -> bool:
        """The bytes have the stored checksum and the slot still is this block's; anything else is a miss."""
        return xxhash.xxh3_64_intdigest(self.buffer) == self._checksum and self.still_held()


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
    """All tickets, leases and reservations of this client are void. Close it and connect anew."""

    reason: str


ClientEvent = Reserved | ReserveRefused | Granted | AcquireEnded | NodeLost


class PoolClient:
    """See the module docstring. ``block_bytes`` is what one block needs; ``client_id`` appears in logs only."""

    def __init__(self, endpoint: str, *, client_id: str, block_bytes: int) -> None:
        self._endpoint = endpoint
        self._client_id = client_id
        self._block_bytes = block_bytes
        self._context = zmq.Context()
        self._socket = make_socket(self._context, zmq.DEALER)
        self._socket.connect(endpoint)
        self._arena: Arena | None = None
        self._incarnation = ""
        self._dead_after_s = 5.0
        self._last_heard = time.monotonic()
        self._lost: str | None = None
        self._next_ticket = 0
        self._reserving: dict[int, tuple[BlockKey, ...]] = {}

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For the owner's poller (POLLIN); nobody else receives from it."""
        return self._socket

    def connect(self, timeout_s: float) -> NodeInfo:
        """Say hello and map the arena. Raises :class:`PoolUnavailableError`."""
        pid, started = process.own()
        self._send(Hello(pid, started))
        if not self._socket.poll(int(timeout_s * 1000)):
            raise PoolUnavailableError(f"pool node at {self._endpoint} did not answer in {timeout_s:g} s")
        try:
            welcome = decode_map(self._socket.recv())
            if welcome["op"] != "welcome":
                raise PoolUnavailableError(f"pool node at {self._endpoint} refuses: {welcome.get('code', 'no welcome')}")
            info = NodeInfo(str(welcome["node_id"]), str(welcome["inc"]), int(welcome["slots"]), int(welcome["slot_bytes"]))
            if info.slot_bytes < self._block_bytes:
                raise PoolUnavailableError(f"slots of {info.slot_bytes} bytes cannot hold blocks of {self._block_bytes}")
            self._arena = Arena.attach(int(welcome["pid"]), int(welcome["fd"]), info.slots, info.slot_bytes)
            self._dead_after_s = float(welcome["client_dead_s"])
        except (MalformedMessageError, KeyError, ValueError, OSError) as error:
            raise PoolUnavailableError(f"pool node at {self._endpoint}: {error}") from error
        self._incarnation = info.incarnation
        self._last_heard = time.monotonic()
        return info

    # --- writing ----------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[BlockKey], *, timeout_s: float, private: bool = False) -> int:
        """Slots for those of ``keys`` that the pool lacks, all or none; waits there for room up to ``timeout_s``."""
        ticket = self._ticket()
        self._reserving[ticket] = tuple(keys)
        self._send(Reserve(ticket, tuple(keys), timeout_s, private))
        return ticket

    def commit(self, slot: ReservedSlot, *, tokens: int, parent: BlockKey | None, meta: bytes = b"") -> None:
        """Make the slot's block visible: ``block_bytes`` of it (none where ``tokens`` is 0) under their checksum (XXH3-64)."""
        length = self._block_bytes if tokens else 0
        checksum = xxhash.xxh3_64_intdigest(slot.buffer[:length])
        self._send(Commit(slot.index, slot.key, parent, tokens, length, checksum, meta))

    def abandon(self, slot: ReservedSlot) -> None:
        """Give a reservation back unwritten."""
        self._send(Abandon(slot.index))

    # --- reading ----------------------------------------------------------------------------------------------------------

    def acquire(self, keys: Sequence[BlockKey], *, wait: bool, source: BlockSourceAddress | None, timeout_s: float) -> int:
        """Lease the longest prefix of ``keys`` that can be had here or from ``source``. With ``wait`` also wait for keys that
        nobody
        has committed yet, up to ``timeout_s``."""
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

    # --- housekeeping -----------------------------------------------------------------------------------------------------

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
            self._last_heard = time.monotonic()
            event = self._read(frame)
            if event is not None:
                events.append(event)
        if self._lost is not None:
            events.append(NodeLost(self._lost))
        return events

    def keepalive(self) -> None:
        """About once a second: shows the node that we live, and notices when the node does not."""
        if time.monotonic() - self._last_heard > self._dead_after_s:
            self._lost = f"silent for {self._dead_after_s:g} s"
        self._send(Keepalive())

    def close(self) -> None:
        """Give everything back and unmap."""
        self._send(Goodbye())
        # The goodbye may leave: a node that never hears it takes everything back after client_dead_s.
        self._socket.close(linger=200)
        self._context.term()
        if self._arena is not None:
            self._arena.close()

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _send(self, request: Request) -> None:
        try:
            self._socket.send(to_wire(request, self._incarnation), zmq.NOBLOCK)
        except zmq.Again:
            self._lost = "it takes no more messages"

    def _read(self, frame: bytes) -> ClientEvent | None:
        assert self._arena is not None
        try:
            message = decode_map(frame)
            match message["op"]:
                case "granted":
                    return Granted(int(message["ticket"]), int(message["position"]), LeasedBlock(self._arena, message))
                case "ended":
                    miss = None if message["miss"] is None else Miss(message["miss"])
                    return AcquireEnded(int(message["ticket"]), int(message["available"]), miss)
                case "reserved":
                    return self._reserved(int(message["ticket"]), message["slots"])
                case "refused":
                    self._reserving.pop(int(message["ticket"]), None)
                    return ReserveRefused(int(message["ticket"]), str(message["reason"]))
                case "error" if message.get("code") != "not_reserved":
                    self._lost = f"it answers {message.get('code')}"
                case _:
                    pass  # alive; or a reservation that was taken back meanwhile: the block is simply not there
        except (MalformedMessageError, KeyError, ValueError, TypeError) as error:
            self._lost = f"it sends what is not in the protocol ({type(error).__name__})"
        return None

    def _reserved(self, ticket: int, rows: list[list[int] | None]) -> Reserved:
        assert self._arena is not None
        keys = self._reserving.pop(ticket)
        slots = tuple(
            None if row is None else ReservedSlot(key, row[0], self._arena.slot(row[0]))
            for key, row in zip(keys, rows, strict=True)
        )
        return Reserved(ticket, slots)
