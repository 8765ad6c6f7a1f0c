"""What a node's state decides, done: answers sent, epochs set, blocks sent, disk and peers ordered. Owned by the node's I/O
thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kv_pool.arena import Arena
from kv_pool.events.publisher import EventPublisher
from kv_pool.local_clients import NAME_PREFIX, LocalClients
from kv_pool.node.messages import Answer, Welcome
from kv_pool.node.stimuli import (
    Action,
    CancelFetch,
    Greet,
    Land,
    Publish,
    SaveBudget,
    Send,
    SendBlock,
    SetEpoch,
    StartFetch,
)
from kv_pool.peers import PeerLinks
from kv_pool.remote_clients import RemoteClients
from kv_pool.ssd.disk.disk import SsdDisk
from kv_pool.ssd.records import ReadRecord, WriteBatch
from kv_pool.transport.codec import encode
from kv_pool.transport.pieces import cut

log = logging.getLogger(__name__)


class Effects:
    """``welcome`` is what every new client is told, ``incarnation`` goes with every answer. ``disk`` is None without an SSD."""

    def __init__(
        self,
        welcome: Welcome,
        incarnation: str,
        *,
        arena: Arena,
        local: LocalClients,
        remote: RemoteClients,
        events: EventPublisher,
        peers: PeerLinks,
        disk: SsdDisk | None,
    ) -> None:
        self._welcome = welcome
        self._incarnation = incarnation
        self._arena = arena
        self._local = local
        self._remote = remote
        self._events = events
        self._peers = peers
        self._disk = disk
        self._gone: list[str] = []
        self.landing: int | None = None
        """The slot that the state has named last for a block that arrives."""
        self.bytes_out = 0
        self.failed = 0
        """Actions that raised: bugs of ours, each of them in the log."""

    @property
    def pending(self) -> bool:
        """Whether :meth:`take_gone` has something to say."""
        return bool(self._gone)

    def take_gone(self) -> list[str]:
        """Clients that are gone, or took nothing more, since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def do(self, actions: Iterable[Action], now: float) -> None:
        """All of them, whatever becomes of one: a batch or a read that is lost on the way would never be answered."""
        for action in actions:
            try:
                self._do_one(action, now)
            except Exception:
                self.failed += 1
                log.exception("pool node %s: %s failed", self._welcome.node_id, type(action).__name__)

    def send(self, client: str, answer: Answer, *, descriptors: Sequence[int] = ()) -> None:
        """``descriptors`` can only go to clients of this machine."""
        message = encode(answer, self._incarnation)
        if client.startswith(NAME_PREFIX):
            took_it = self._local.send(client, message, descriptors)
        else:
            took_it = self._remote.send(client, [message])
        if not took_it:
            self._gone.append(client)

    def reply(self, client: str, frames: Sequence[bytes]) -> None:
        """The answer to a question, which has a form of its own."""
        if not self._remote.send(client, frames):
            self._gone.append(client)

    def _do_one(self, action: Action, now: float) -> None:
        match action:
            case Send(client, answer):
                self.send(client, answer)
            case SendBlock():
                self._send_block(action)
            case Greet(client):
                self._greet(client)
            case Publish(event):
                self._events.add(event)
            case SetEpoch(slot, epoch):
                self._arena.set_epoch(slot, epoch)
            case StartFetch():
                self._peers.start(action, now)
            case CancelFetch(fetch, peer):
                self._peers.cancel(fetch, peer)
            case Land(slot):
                self.landing = slot
            case WriteBatch() | ReadRecord() | SaveBudget():
                self._order_disk(action)

    def _greet(self, client: str) -> None:
        self.send(client, self._welcome, descriptors=(self._arena.fd,) if client.startswith(NAME_PREFIX) else ())

    def _order_disk(self, action: WriteBatch | ReadRecord | SaveBudget) -> None:
        assert self._disk is not None
        match action:
            case WriteBatch():
                self._disk.write(action)
            case ReadRecord():
                self._disk.read(action)
            case SaveBudget(packed):
                self._disk.save_budget(packed)

    def _send_block(self, action: SendBlock) -> None:
        """The bytes leave from the arena without a copy."""
        payload = self._arena.slot_read_only(action.slot)[: action.length]
        for header, piece in cut(action.answer, payload):
            if not self._remote.send(action.client, [encode(header, self._incarnation), piece], copy=False):
                self._gone.append(action.client)
                return
            self.bytes_out += len(piece)
