"""A node's links to other nodes: it asks for blocks as a client does, and their bytes come with the answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash
import zmq

from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.node.messages import Acquire, Cancel, Commit, Goodbye, Hello, Keepalive, Miss, Peer, StartFetch
from kv_pool.transport.codec import META_BYTES_MAX, MalformedMessageError, decode_map, to_wire
from kv_pool.transport.sockets import CONTROL_BYTES_MAX, make_socket

PEERS_MAX: Final = 256
KEEPALIVE_PERIOD_S: Final = 1.0
IDLE_CLOSE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ArrivedBlock:
    """A block from a peer, still in the frame that zmq received."""

    fetch: int
    commit: Commit
    private: bool
    payload: memoryview

    def land(self, slot: memoryview) -> bool:
        """Copy into ``slot``; True where the bytes there have the checksum that the peer stored."""
        slot[: self.commit.length] = self.payload
        return xxhash.xxh3_64_intdigest(slot[: self.commit.length]) == self.commit.checksum


@dataclass(slots=True)
class _Link:
    peer: Peer
    socket: zmq.Socket[bytes]
    last_heard: float
    last_used: float
    next_keepalive: float
    incarnation: str = ""
    waiting: list[StartFetch] = field(default_factory=list)
    """Asked before the peer said welcome."""
    fetches: set[int] = field(default_factory=set)


class PeerLinks:
    """Owned by the node's I/O thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], slot_bytes: int, dead_after_s: float) -> None:
        self._context = context
        self._slot_bytes = slot_bytes
        self._dead_after_s = dead_after_s
        self._links: dict[str, _Link] = {}
        self._ended: list[tuple[int, Miss | None]] = []

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [link.socket for link in self._links.values()]

    def start(self, fetch: StartFetch) -> None:
        """Ask for a fetch's blocks; a peer not met yet is met first."""
        link = self._links.get(fetch.peer.endpoint)
        if link is None:
            if len(self._links) >= PEERS_MAX:
                self._ended.append((fetch.fetch, Miss.REFUSED))
                return
            link = self._connect(fetch.peer)
        link.fetches.add(fetch.fetch)
        link.last_used = time.monotonic()
        if link.incarnation:
            self._ask(link, fetch)
        else:
            link.waiting.append(fetch)

    def cancel(self, fetch: int, peer: Peer) -> None:
        link = self._links.get(peer.endpoint)
        if link is not None and fetch in link.fetches:
            link.fetches.discard(fetch)
            link.waiting = [f for f in link.waiting if f.fetch != fetch]
            if link.incarnation:
                self._send(link, to_wire(Cancel(fetch), link.incarnation))

    def receive(self, now: float, limit: int) -> list[ArrivedBlock]:
        """Blocks that have arrived. Ends of fetches are kept for :meth:`ended`."""
        blocks: list[ArrivedBlock] = []
        for link in list(self._links.values()):
            for _ in range(limit):
                try:
                    frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                link.last_heard = now
                try:
                    block = self._read(link, [frame.buffer for frame in frames])
                except (MalformedMessageError, KeyError, ValueError, TypeError):
                    self._drop(link)
                    break
                if block is not None:
                    blocks.append(block)
        return blocks

    def ended(self) -> list[tuple[int, Miss | None]]:
        """(fetch, miss) of fetches that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def tick(self, now: float) -> list[tuple[int, Miss | None]]:
        """Keep links alive, drop silent and idle ones."""
        for link in list(self._links.values()):
            if (link.fetches and now - max(link.last_heard, link.last_used) > self._dead_after_s) or (
                not link.fetches and now - link.last_used > IDLE_CLOSE_S
            ):
                self._drop(link)
            elif link.incarnation and now >= link.next_keepalive:
                self._send(link, to_wire(Keepalive(), link.incarnation))
                link.next_keepalive = now + KEEPALIVE_PERIOD_S
        return self.ended()

    def close(self) -> None:
        for link in list(self._links.values()):
            self._drop(link)

    def _connect(self, peer: Peer) -> _Link:
        socket = make_socket(self._context, zmq.DEALER, bytes_max=self._slot_bytes + CONTROL_BYTES_MAX)
        socket.connect(peer.endpoint)
        now = time.monotonic()
        link = _Link(peer, socket, last_heard=now, last_used=now, next_keepalive=now)
        self._links[peer.endpoint] = link
        self._send(link, to_wire(Hello(0, 0), ""))
        return link

    def _ask(self, link: _Link, fetch: StartFetch) -> None:
        request = Acquire(fetch.fetch, fetch.keys, fetch.wait, fetch.timeout_s, None, payload=True)
        self._send(link, to_wire(request, link.incarnation))

    def _send(self, link: _Link, frame: bytes) -> None:
        try:
            link.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        """Whatever was asked of this peer is lost."""
        if self._links.pop(link.peer.endpoint, None) is None:
            return
        self._ended += [(fetch, Miss.LOST) for fetch in sorted(link.fetches)]
        if link.incarnation:
            try:
                link.socket.send(to_wire(Goodbye(), link.incarnation), zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # it is gone: it will notice by our silence
        link.socket.close(0)

    def _read(self, link: _Link, frames: list[memoryview]) -> ArrivedBlock | None:
        message = decode_map(frames[0])
        match message["op"]:
            case "welcome":
                link.incarnation = str(message["inc"])
                waiting, link.waiting = link.waiting, []
                for fetch in waiting:
                    self._ask(link, fetch)
            case "granted":
                return self._block(link, message, frames)
            case "ended":
                fetch = int(message["ticket"])
                if fetch in link.fetches:
                    link.fetches.discard(fetch)
                    self._ended.append((fetch, None if message["miss"] is None else Miss(message["miss"])))
            case "error":
                self._drop(link)
            case _:
                pass  # alive
        return None

    def _block(self, link: _Link, message: dict[str, Any], frames: list[memoryview]) -> ArrivedBlock | None:
        length = int(message["length"])
        if len(frames) != 2 or len(frames[1]) != length or length > self._slot_bytes or len(message["meta"]) > META_BYTES_MAX:
            raise MalformedMessageError("payload: not as long as announced")
        if len(message["key"]) != KEY_BYTES:
            raise MalformedMessageError("key: bad length")
        if int(message["ticket"]) not in link.fetches:
            return None
        parent = message["parent"]
        commit = Commit(
            -1,
            BlockKey(message["key"]),
            None if parent is None else BlockKey(parent),
            int(message["tokens"]),
            length,
            int(message["checksum"]),
            bytes(message["meta"]),
        )
        return ArrivedBlock(int(message["ticket"]), commit, bool(message["private"]), frames[1])
