"""A node's links to other nodes: it pulls blocks as a client, and their bytes come with the answers.

::

    here                                             peer
    Pull(keys, credits) ------------------------------>
    <------ Granted(lease), Piece ... with bytes, at most `credits` blocks unreleased; Stalled; Ended
    Release(lease) once the bytes are in a slot ------>   returns the credit

Every fetch that is begun ends with exactly one FetchEnded, unless the node calls it off: by the peer's word, or LOST when the
link breaks, falls silent or talks nonsense. A block that has been given a slot ends with exactly one BlockLanded, whatever
becomes of its fetch and its link.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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
    Piece,
    Pull,
    Refusal,
    Release,
    Request,
    Stalled,
    Welcome,
)
from kv_pool.node.stimuli import BlockArrived, BlockLanded, FetchEnded, FetchStalled, StartFetch
from kv_pool.transport.codec import ANSWERS, MalformedMessageError, decode, encode
from kv_pool.transport.curve import CurveKeys, connect
from kv_pool.transport.pieces import Landing
from kv_pool.transport.sockets import make_socket

PEERS_MAX: Final = 256
KEEPALIVE_PERIOD_S: Final = 1.0
IDLE_CLOSE_S: Final = 30.0
PULLS_KEPT_MAX: Final = 64
MESSAGES_WAITING_MAX: Final = 64
"""Of one peer, received and not looked at yet: 32 MiB of pieces. What else is on the way waits at the peer, in its arena."""
MESSAGES_PER_TURN_MAX: Final = 256
BYTES_PER_TURN_MAX: Final = 8 * 1024 * 1024
"""To be copied and checked, of all peers together, while this machine's workers wait."""
NOWHERE: Final = bytearray()


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
    landing: Landing | None = None
    """The block whose pieces are coming in. A peer sends one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A block begins to come in. Who wants it names its slot (``landing.into``) before the next event is taken."""

    landing: Landing

    def event(self) -> BlockArrived:
        g = self.landing.grant
        commit = Commit(-1, g.key, g.parent, g.tokens, g.length, g.checksum, g.meta)
        return BlockArrived(self.landing.fetch, commit, g.private, g.tier, g.retention)


PeerEvent = Arrival | BlockLanded | FetchStalled | FetchEnded


class PeerLinks:
    """Owned by the node's I/O thread. ``window`` (the credits of a pull) bounds the blocks on the way from one peer, and with it
    the memory that they take."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        slot_bytes: int,
        window: int,
        dead_after_s: float,
        keys: CurveKeys | None = None,
    ) -> None:
        self._context = context
        self._slot_bytes = slot_bytes
        self._window = window
        self._keys = keys
        self._dead_after_s = dead_after_s
        self._links: dict[str, _Link] = {}
        self._ended: list[BlockLanded | FetchEnded] = []
        self.bytes_in = 0
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
            if link.landing is not None and link.landing.fetch == fetch:
                self._give_up(link.landing)  # the rest of the block still comes, and goes nowhere
            self._send(link, Cancel(fetch))

    # --- what comes of it ---------------------------------------------------------------------------------------------------

    def receive(self, now: float) -> Iterator[PeerEvent]:
        """What has arrived, at most ``BYTES_PER_TURN_MAX`` of it, so that no peer holds up the node's own clients. The peers take
        turns."""
        left = BYTES_PER_TURN_MAX
        for link in list(self._links.values()):
            if left <= 0 or not self._is_open(link):
                continue
            self._links[link.peer.endpoint] = self._links.pop(link.peer.endpoint)  # behind those that get nothing this time
            try:
                for _ in range(MESSAGES_PER_TURN_MAX):
                    header = link.socket.recv(zmq.NOBLOCK)
                    link.heard_at = now
                    before = self.bytes_in
                    yield from self._read(link, header, now)
                    left -= len(header) + self.bytes_in - before
                    if left <= 0 or not self._is_open(link):
                        break
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
            waiting_max=MESSAGES_WAITING_MAX,
        )
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        link = _Link(peer, socket, monitor, heard_at=now, used_at=now, next_keepalive=now)
        try:
            connect(socket, peer.endpoint, self._keys)
        except zmq.ZMQError:
            self._close(link)
            return None
        self._links[peer.endpoint] = link
        self._send(link, Hello())
        return link

    def _ask(self, link: _Link, fetch: StartFetch) -> None:
        self._send(link, Pull(fetch.fetch, fetch.keys, fetch.wait, fetch.timeout_s, self._window))

    def _is_open(self, link: _Link) -> bool:
        return self._links.get(link.peer.endpoint) is link

    def _send(self, link: _Link, request: Request) -> None:
        if not self._is_open(link):
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
        if not self._is_open(link):
            return
        if link.incarnation:
            with contextlib.suppress(zmq.ZMQError):  # it is gone already: it will notice our silence
                link.socket.send(encode(Goodbye(), link.incarnation), zmq.NOBLOCK)
        del self._links[link.peer.endpoint]
        landing, link.landing = link.landing, None
        if landing is not None:
            self._give_up(landing)
        self._ended += [FetchEnded(fetch, Miss.LOST) for fetch in sorted(link.fetches)]
        link.fetches.clear()
        self._close(link)

    def _give_up(self, landing: Landing) -> None:
        if landing.slot is not None:
            self._ended.append(BlockLanded(landing.slot, sound=False, lost=True))
            landing.into_nowhere()

    def _close(self, link: _Link) -> None:
        link.socket.disable_monitor()
        link.monitor.close(0)
        link.socket.close(0)

    def _read(self, link: _Link, header: bytes, now: float) -> Iterator[PeerEvent]:
        """What the message means that ``header`` begins. Raises MalformedMessageError where the peer is to be dropped."""
        answer, incarnation = decode(header, ANSWERS)
        has_bytes = bool(link.socket.getsockopt(zmq.RCVMORE))
        if has_bytes != isinstance(answer, Granted | Piece):
            raise MalformedMessageError("bytes: with grants and pieces, and with nothing else")
        if isinstance(answer, Welcome) and not link.incarnation:
            link.incarnation = incarnation
            for asked in list(link.fetches.values()):
                asked.at = now
                self._ask(link, asked.fetch)
            return
        if incarnation != link.incarnation:
            raise MalformedMessageError("another incarnation than the one met")
        match answer:
            case Granted(ticket):
                landing = self._begin(link, ticket, answer.grants())
                link.used_at = now
                if ticket in link.fetches:  # else it was called off meanwhile
                    yield Arrival(landing)
                yield from self._take(link, landing)
            case Piece(ticket, lease, offset):
                landing = link.landing
                if landing is None or (ticket, lease, offset) != (landing.fetch, landing.grant.lease, landing.filled):
                    raise MalformedMessageError("piece: not the next one of the block under way")
                link.used_at = now
                yield from self._take(link, landing)
            case Stalled(ticket) if ticket in link.fetches:
                yield FetchStalled(ticket)
            case Ended(ticket, _, miss):
                if link.landing is not None and link.landing.fetch == ticket:
                    raise MalformedMessageError("ended: in the middle of a block")
                yield from self._end(link, ticket, miss, now)
            case Refusal():
                self._drop(link)
            case _:
                pass

    def _begin(self, link: _Link, ticket: int, grants: list[Grant]) -> Landing:
        if len(grants) != 1 or grants[0].length > self._slot_bytes:
            raise MalformedMessageError("grants: one block that fits a slot is needed")
        if link.landing is not None:
            raise MalformedMessageError("granted: in the middle of another block")
        link.landing = Landing(ticket, grants[0])
        return link.landing

    def _take(self, link: _Link, landing: Landing) -> Iterator[PeerEvent]:
        """Receive the bytes of the message that has begun straight into their place."""
        if link.landing is not landing:
            return  # the link was dropped meanwhile
        room, expected = landing.room(), landing.expected
        # Into no room the bytes are received and forgotten; the length told is that of the frame all the same.
        size = link.socket.recv_into(room or NOWHERE, flags=zmq.NOBLOCK)
        if size != expected or link.socket.getsockopt(zmq.RCVMORE):
            raise MalformedMessageError("bytes: one frame, as long as announced, is needed")
        landing.take()
        self.bytes_in += size
        if landing.fetch in link.fetches:
            link.fetches[landing.fetch].bytes += size
        if not landing.complete:
            return
        link.landing = None
        sound = landing.sound
        # A private block that is kept has moved here, and goes away there.
        self._send(link, Release((landing.grant.lease,), consume=sound and landing.grant.private))
        if landing.slot is not None:
            yield BlockLanded(landing.slot, sound)

    def _end(self, link: _Link, ticket: int, miss: Miss | None, now: float) -> Iterator[FetchEnded]:
        asked = link.fetches.pop(ticket, None)
        if asked is None:
            return
        if asked.bytes and not asked.fetch.wait:
            self.pulls.append(Pulled(link.peer.node_id, asked.bytes, now - asked.at))
        yield FetchEnded(ticket, miss)
