"""A node's links to other nodes: it pulls blocks as a client, and their bytes come with the answers.

::

    here                                             peer
    Pull(keys, credits) ------------------------------>
    <------ Granted(lease) + bytes, at most `credits` unreleased; Stalled; Ended
    Release(lease) once the bytes are in a slot ------>   returns the credit

Every fetch that is begun ends with exactly one FetchEnded, unless the node calls it off: by the peer's word, or LOST when the
link breaks, falls silent or talks nonsense.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash
import zmq
from zmq.utils.monitor import recv_monitor_message

from kv_pool.node.messages import (
    Cancel,
    Commit,
    Ended,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Keepalive,
    Miss,
    Peer,
    Pull,
    Refusal,
    Release,
    Request,
    Stalled,
    Welcome,
)
from kv_pool.node.stimuli import BlockArrived, FetchEnded, FetchStalled, StartFetch
from kv_pool.transport.codec import ANSWERS, MalformedMessageError, decode, encode
from kv_pool.transport.sockets import CONTROL_BYTES_MAX, make_socket

PEERS_MAX: Final = 256
KEEPALIVE_PERIOD_S: Final = 1.0
IDLE_CLOSE_S: Final = 30.0
PULLS_KEPT_MAX: Final = 64
CONTROL_MESSAGES_WAITING_MAX: Final = 64
"""Answers without a block that may wait in a link's queue, beside the blocks that the credits allow."""


class Pulled(NamedTuple):
    """How long a peer took to send what it had: a figure for the speed of the link."""

    node_id: str
    bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Asked:
    fetch: StartFetch
    at: float
    bytes: int = 0


@dataclass(slots=True, eq=False)
class _Link:
    peer: Peer
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    heard_at: float
    used_at: float
    next_keepalive: float
    incarnation: str = ""
    """Empty until the peer has said welcome."""
    fetches: dict[int, _Asked] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A block from a peer, still in the frame that zmq received."""

    link: _Link
    fetch: int
    grant: Grant
    payload: memoryview

    def event(self) -> BlockArrived:
        g = self.grant
        commit = Commit(-1, g.key, g.parent, g.tokens, g.length, g.checksum, g.meta)
        return BlockArrived(self.fetch, commit, g.private, g.tier)

    def land(self, slot: memoryview) -> bool:
        """Copy into ``slot``; True where the bytes there have the checksum that their writer computed."""
        target = slot[: self.grant.length]
        target[:] = self.payload
        return xxhash.xxh3_64_intdigest(target) == self.grant.checksum


PeerEvent = Arrival | FetchStalled | FetchEnded


class PeerLinks:
    """Owned by the node's I/O thread. ``window`` (the credits of a pull) bounds the blocks on the way from one peer, and with it
    the memory that they take."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, slot_bytes: int, window: int, dead_after_s: float) -> None:
        self._context = context
        self._slot_bytes = slot_bytes
        self._window = window
        self._dead_after_s = dead_after_s
        self._links: dict[str, _Link] = {}
        self._ended: list[FetchEnded] = []
        self.pulls: deque[Pulled] = deque(maxlen=PULLS_KEPT_MAX)
        """Of the latest fetches that did not wait for anything but the link. Another thread may take them."""

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled for input."""
        return [socket for link in self._links.values() for socket in (link.socket, link.monitor)]

    @property
    def pending(self) -> bool:
        """Whether :meth:`receive` has something to say without any input."""
        return bool(self._ended)

    # --- what the node wants ------------------------------------------------------------------------------------------------

    def start(self, fetch: StartFetch, now: float) -> None:
        """Ask for a fetch's blocks; a peer not met yet is met first."""
        link = self._links.get(fetch.peer.endpoint) or self._connect(fetch.peer, now)
        if link is None:
            self._ended.append(FetchEnded(fetch.fetch, Miss.REFUSED))
            return
        link.fetches[fetch.fetch] = _Asked(fetch, now)
        link.used_at = now
        if link.incarnation:
            self._ask(link, fetch)

    def cancel(self, fetch: int, peer: Peer) -> None:
        link = self._links.get(peer.endpoint)
        if link is not None and link.fetches.pop(fetch, None) is not None and link.incarnation:
            self._send(link, Cancel(fetch))

    def release(self, arrival: Arrival, *, kept: bool) -> None:
        """The block was dealt with; a private one that is ``kept`` has moved here and goes away there."""
        self._send(arrival.link, Release((arrival.grant.lease,), consume=kept and arrival.grant.private))

    # --- what comes of it ---------------------------------------------------------------------------------------------------

    def receive(self, now: float, messages_max: int) -> Iterator[PeerEvent]:
        """What has arrived, at most ``messages_max`` messages of each peer, so that no peer holds up the node's own clients."""
        for link in list(self._links.values()):
            try:
                for _ in range(messages_max):
                    frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    link.heard_at = now
                    event = self._read(link, [frame.buffer for frame in frames], now)
                    if event is not None:
                        yield event
            except zmq.Again:
                self._look_at_monitor(link)
            except MalformedMessageError:
                self._drop(link)
        ended, self._ended = self._ended, []
        yield from ended

    def tick(self, now: float) -> None:
        """Keep links alive, drop silent and idle ones."""
        for link in list(self._links.values()):
            silent = now - max(link.heard_at, link.used_at) > self._dead_after_s
            if (silent and link.fetches) or (not link.fetches and now - link.used_at > IDLE_CLOSE_S):
                self._drop(link)
            elif link.incarnation and now >= link.next_keepalive:
                link.next_keepalive = now + KEEPALIVE_PERIOD_S
                self._send(link, Keepalive())

    def close(self) -> None:
        for link in list(self._links.values()):
            self._drop(link)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer, now: float) -> _Link | None:
        if len(self._links) >= PEERS_MAX:
            return None
        socket = make_socket(
            self._context,
            zmq.DEALER,
            bytes_max=self._slot_bytes + CONTROL_BYTES_MAX,
            waiting_max=self._window + CONTROL_MESSAGES_WAITING_MAX,
        )
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        link = _Link(peer, socket, monitor, heard_at=now, used_at=now, next_keepalive=now)
        try:
            socket.connect(peer.endpoint)
        except zmq.ZMQError:
            self._close(link)
            return None
        self._links[peer.endpoint] = link
        self._send(link, Hello())
        return link

    def _ask(self, link: _Link, fetch: StartFetch) -> None:
        self._send(link, Pull(fetch.fetch, fetch.keys, fetch.wait, fetch.timeout_s, self._window))

    def _send(self, link: _Link, request: Request) -> None:
        if self._links.get(link.peer.endpoint) is not link:
            return
        try:
            link.socket.send(encode(request, link.incarnation), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._drop(link)

    def _look_at_monitor(self, link: _Link) -> None:
        """A broken connection is a lost peer at once; one that merely hangs is found out by its silence."""
        with contextlib.suppress(zmq.Again):
            recv_monitor_message(link.monitor, zmq.NOBLOCK)
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        """Whatever was asked of this peer is lost."""
        if self._links.get(link.peer.endpoint) is not link:
            return
        if link.incarnation:
            with contextlib.suppress(zmq.ZMQError):  # it is gone already: it will notice our silence
                link.socket.send(encode(Goodbye(), link.incarnation), zmq.NOBLOCK)
        del self._links[link.peer.endpoint]
        self._ended += [FetchEnded(fetch, Miss.LOST) for fetch in sorted(link.fetches)]
        link.fetches.clear()
        self._close(link)

    def _close(self, link: _Link) -> None:
        link.socket.disable_monitor()
        link.monitor.close(0)
        link.socket.close(0)

    def _read(self, link: _Link, frames: list[memoryview], now: float) -> PeerEvent | None:
        answer, incarnation = decode(frames[0], ANSWERS)
        if isinstance(answer, Welcome):
            link.incarnation = incarnation
            for asked in list(link.fetches.values()):
                asked.at = now
                self._ask(link, asked.fetch)
            return None
        if incarnation != link.incarnation:
            raise MalformedMessageError("another incarnation than the one met")
        match answer:
            case Granted(ticket):
                return self._arrival(link, ticket, answer.grants(), frames, now)
            case Stalled(ticket):
                return FetchStalled(ticket) if ticket in link.fetches else None
            case Ended(ticket, _, miss):
                return self._end(link, ticket, miss, now)
            case Refusal():
                self._drop(link)
        return None

    def _arrival(self, link: _Link, ticket: int, grants: list[Grant], frames: list[memoryview], now: float) -> Arrival | None:
        if len(grants) != 1 or len(frames) != 2:
            raise MalformedMessageError("one block and its bytes are needed")
        (grant,) = grants
        if len(frames[1]) != grant.length or grant.length > self._slot_bytes:
            raise MalformedMessageError("payload: not as long as announced")
        link.used_at = now
        arrival = Arrival(link, ticket, grant, frames[1])
        asked = link.fetches.get(ticket)
        if asked is None:  # called off meanwhile
            self.release(arrival, kept=False)
            return None
        asked.bytes += grant.length
        return arrival

    def _end(self, link: _Link, ticket: int, miss: Miss | None, now: float) -> FetchEnded | None:
        asked = link.fetches.pop(ticket, None)
        if asked is None:
            return None
        if asked.bytes and not asked.fetch.wait:
            self.pulls.append(Pulled(link.peer.node_id, asked.bytes, now - asked.at))
        return FetchEnded(ticket, miss)
