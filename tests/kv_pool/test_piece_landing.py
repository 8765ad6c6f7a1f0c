"""Blocks in pieces, from a peer that we play: what lands, what ends a link, and what is left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

from kv_pool.client import AcquireEnded, Miss, PoolClient
from kv_pool.keys import BlockKey
from kv_pool.node.messages import Alive, Cancel, Ended, Granted, Hello, Peer, Piece, Pull, Release, grant_row
from kv_pool.node.stimuli import StartFetch
from kv_pool.peers import BYTES_PER_TURN_MAX, Arrival, PeerLinks
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings
from kv_pool.transport.pieces import PIECE_BYTES, cut, pieces_of
from tests.kv_pool.conftest import OpenSocket
from tests.kv_pool.played_peer import PlayedPeer, granted
from tests.kv_pool.played_peer import messages as messages_of
from tests.kv_pool.pool_world import chain, connect, content, get, key, until, wait_for

BLOCK_BYTES = 3 * PIECE_BYTES + 1000
SLOTS = 8


@pytest.fixture
def node() -> Iterator[PoolNode]:
    settings = PoolSettings(dram=str(SLOTS * BLOCK_BYTES), client_dead_s=3.0, lease_s=30.0)
    node = PoolNode(node_id="node-a", slot_bytes=BLOCK_BYTES, settings=settings)
    node.start()
    yield node
    assert node.stats()["turns_failed"] == 0
    node.stop()


def longer(answer: Granted) -> bytes:
    """The grant's row, of a block that no slot can hold."""
    (grant,) = answer.grants()
    return grant_row(grant.key, None, 0, 1, 16, BLOCK_BYTES + 1, grant.checksum, private=False)


@pytest.fixture
def client(node: PoolNode) -> Iterator[PoolClient]:
    client = connect(node.local_endpoint, block_bytes=BLOCK_BYTES)
    yield client
    client.close()


def messages(pull: Pull, k: BlockKey, **more: int) -> list[tuple[Granted | Piece, memoryview]]:
    return messages_of(pull, k, BLOCK_BYTES, **more)


def play(open_socket: OpenSocket) -> PlayedPeer:
    return PlayedPeer(open_socket(zmq.ROUTER), BLOCK_BYTES)


@pytest.fixture
def peer(open_socket: OpenSocket) -> PlayedPeer:
    return play(open_socket)


def end_of(client: PoolClient) -> AcquireEnded:
    return next(e for e in wait_for(client, AcquireEnded) if isinstance(e, AcquireEnded))


def clean(node: PoolNode, committed: int = 0) -> Callable[[], bool]:
    def is_clean() -> bool:
        stats = node.stats()
        return (stats["slots_free"], stats["slots_reserved"], stats["fetches"]) == (SLOTS - committed, 0, 0)

    return is_clean


@pytest.mark.parametrize(("length", "count"), [(0, 1), (1, 1), (PIECE_BYTES, 1), (PIECE_BYTES + 1, 2), (3 * PIECE_BYTES, 3)])
def test_a_block_is_cut_into_pieces_that_make_it_up(length: int, count: int):
    payload = memoryview(content(key(1), length))
    cuts = list(cut(granted(Pull(7, (key(1),), False, 1.0, 1), key(1), length, lease=3), payload))
    assert len(cuts) == count == pieces_of(length)
    assert b"".join(piece for _, piece in cuts) == payload
    assert isinstance(cuts[0][0], Granted)
    assert [header for header, _ in cuts[1:]] == [Piece(7, 3, PIECE_BYTES * i) for i in range(1, count)]


def test_pieces_land_one_after_the_other_with_other_messages_between(node: PoolNode, client: PoolClient, peer: PlayedPeer):
    client.acquire(chain(2), wait=False, sources=[peer.source], timeout_s=10.0)
    pull = peer.welcome()
    for position, k in enumerate(chain(2)):
        for header, piece in messages(pull, k, position=position, lease=position + 1):
            peer.say(header, piece)
            peer.say(Alive())
        assert peer.hear(Release) == Release((position + 1,), False)
    peer.say(Ended(pull.ticket, 2, None))
    end = end_of(client)
    assert (end.available, end.miss) == (2, None)
    client.keepalive()
    blocks, _ = get(client, chain(2))
    assert [bytes(block.buffer) == content(block.key, BLOCK_BYTES) for block in blocks] == [True, True]


BAD = {
    "a piece out of order": lambda m: [m[0], m[2]],
    "the first piece again": lambda m: [m[0], m[0]],
    "a piece twice": lambda m: [m[0], m[1], m[1]],
    "a piece without a block": lambda m: [m[1]],
    "a piece of another ticket": lambda m: [m[0], (replace(m[1][0], ticket=99), m[1][1])],
    "a piece of another lease": lambda m: [m[0], (replace(m[1][0], lease=99), m[1][1])],
    "a piece too short": lambda m: [m[0], (m[1][0], m[1][1][:-1])],
    "a piece too long": lambda m: [m[0], m[1], m[2], (m[3][0], bytes(1001))],
    "a first piece too long": lambda m: [(m[0][0], bytes(PIECE_BYTES + 1))],
    "an empty piece": lambda m: [m[0], (m[1][0], b"")],
    "a piece after the last": lambda m: [*m, (replace(m[3][0], offset=BLOCK_BYTES), b"")],
    "no bytes": lambda m: [m[0], (m[1][0],)],
    "two frames of bytes": lambda m: [m[0], (m[1][0], m[1][1], b"more")],
    "a grant without bytes": lambda m: [(m[0][0],)],
    "bytes without a grant": lambda m: [(Ended(m[0][0].ticket, 0, Miss.NOT_FOUND), b"bytes")],
    "an end in the middle": lambda m: [m[0], (Ended(m[0][0].ticket, 1, None),)],
    "a block over a slot": lambda m: [(replace(m[0][0], rows=longer(m[0][0])), m[0][1])],
    "two grants at once": lambda m: [(replace(m[0][0], rows=m[0][0].rows * 2, tiers=bytes(2)), m[0][1])],
}


@pytest.mark.parametrize("what", BAD)
def test_a_peer_that_breaks_the_rules_is_dropped_and_its_slot_is_free(
    node: PoolNode, client: PoolClient, peer: PlayedPeer, what: str
):
    client.acquire(chain(2), wait=False, sources=[peer.source], timeout_s=20.0)
    pull = peer.welcome()
    for header, *frames in BAD[what](messages(pull, key(1))):
        peer.say(header, *frames)
    end = end_of(client)
    assert end.miss is Miss.LOST
    until(clean(node, committed=end.available), clients=(client,))
    assert node.stats()["corrupt"] == 0
    # The node is well: an honest peer's block lands.
    client.acquire(chain(1, first=50), wait=False, sources=[peer.source], timeout_s=10.0)
    again = peer.welcome()
    for header, piece in messages(again, key(50)):
        peer.say(header, piece)
    peer.say(Ended(again.ticket, 1, None))
    assert end_of(client).miss is None


def test_a_word_of_another_incarnation_in_the_middle_ends_the_link(node: PoolNode, client: PoolClient, peer: PlayedPeer):
    client.acquire(chain(1), wait=False, sources=[peer.source], timeout_s=20.0)
    first, second, *_ = messages(peer.welcome(), key(1))
    peer.say(*first)
    peer.incarnation = "i2"
    peer.say(*second)
    assert end_of(client).miss is Miss.LOST
    until(clean(node), clients=(client,))


def test_bytes_spoiled_in_the_last_piece_are_noticed(node: PoolNode, client: PoolClient, peer: PlayedPeer):
    client.acquire(chain(1), wait=False, sources=[peer.source], timeout_s=20.0)
    *most, (header, last) = messages(peer.welcome(), key(1))
    for message in most:
        peer.say(*message)
    peer.say(header, bytes(last[:-1]) + b"\xff")
    assert end_of(client).miss is Miss.CORRUPT
    assert peer.hear(Release) == Release((1,), False)
    until(clean(node), clients=(client,))
    assert node.stats()["corrupt"] == 1


def test_a_peer_that_dies_in_the_middle_of_a_block_is_lost_at_once(node: PoolNode, client: PoolClient, open_socket: OpenSocket):
    router = open_socket(zmq.ROUTER)
    peer = PlayedPeer(router, BLOCK_BYTES)
    client.acquire(chain(1), wait=True, sources=[peer.source], timeout_s=20.0)
    peer.say(*messages(peer.welcome(), key(1))[0])
    until(lambda: node.stats()["slots_reserved"] == 1, clients=(client,))
    router.close(0)
    assert end_of(client).miss is Miss.LOST
    until(clean(node), clients=(client,))


def test_a_block_called_off_in_the_middle_gives_its_slot_back_and_the_link_goes_on(
    node: PoolNode, client: PoolClient, peer: PlayedPeer
):
    ticket = client.acquire(chain(1), wait=True, sources=[peer.source], timeout_s=20.0)
    pull = peer.welcome()
    first, *rest = messages(pull, key(1))
    peer.say(*first)
    until(lambda: node.stats()["slots_reserved"] == 1, clients=(client,))
    client.cancel(ticket)
    peer.hear(Cancel)
    until(clean(node), clients=(client,))
    for message in rest:
        peer.say(*message)
    assert peer.hear(Release) == Release((1,), False)
    # The same key once more, over the same link.
    client.acquire(chain(1), wait=True, sources=[peer.source], timeout_s=20.0)
    again = peer.hear(Pull)
    for message in messages(again, key(1), lease=2):
        peer.say(*message)
    peer.say(Ended(again.ticket, 1, None))
    assert end_of(client).miss is None
    assert get(client, chain(1))[0][0].verify()


def test_blocks_that_nobody_wants_are_received_and_forgotten(node: PoolNode, client: PoolClient, peer: PlayedPeer):
    client.acquire(chain(1), wait=True, sources=[peer.source], timeout_s=20.0)
    pull = peer.welcome()
    for lease in range(2, 2 + 2 * SLOTS):
        for message in messages(pull, key(100 + lease), lease=lease):
            peer.say(*message)
        assert peer.hear(Release) == Release((lease,), False)
    until(clean_but_waiting(node), clients=(client,))


def clean_but_waiting(node: PoolNode) -> Callable[[], bool]:
    return lambda: (node.stats()["slots_free"], node.stats()["fetches"]) == (SLOTS, 1)


def test_two_peers_land_at_the_same_time(node: PoolNode, client: PoolClient, open_socket: OpenSocket):
    peers = [play(open_socket) for _ in range(2)]
    pulls: list[Pull] = []
    for i, peer in enumerate(peers):
        client.acquire([key(1 + i)], wait=False, sources=[peer.source], timeout_s=20.0)
        pulls.append(peer.welcome())
    for step in zip(messages(pulls[0], key(1)), messages(pulls[1], key(2)), strict=True):
        for peer, message in zip(peers, step, strict=True):
            peer.say(*message)
    for peer, pull in zip(peers, pulls, strict=True):
        assert peer.hear(Release) == Release((1,), False)
        peer.say(Ended(pull.ticket, 1, None))
    until(clean(node, committed=2))
    for k in (key(1), key(2)):
        client.keepalive()
        assert get(client, [k])[0][0].verify()


PIECES = pieces_of(BLOCK_BYTES)
BLOCKS_EACH = 12
"""Of two peers: several times what a turn takes."""


@pytest.fixture
def waiting(open_socket: OpenSocket) -> Iterator[PeerLinks]:
    """Links to two peers that send more than a turn takes; nobody wants it, which is no reason to take more."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = PeerLinks(context, slot_bytes=BLOCK_BYTES, window=8, dead_after_s=5.0)
    played = [play(open_socket) for _ in range(2)]
    for number, peer in enumerate(played):
        links.start(StartFetch(number, Peer("played", peer.source.endpoint), (key(1),), False, 5.0), now=0.0)
        peer.hear(Hello)
        peer.say(peer.greeting)
    pulls = [pull for peer in played for pull in _hear_pull(links, peer)]
    for peer, pull in zip(played, pulls, strict=True):
        for lease in range(1, BLOCKS_EACH + 1):
            for message in messages(pull, key(lease), lease=lease):
                peer.say(*message)
    yield links
    links.close()
    context.term()


def _hear_pull(links: PeerLinks, peer: PlayedPeer) -> list[Pull]:
    until(lambda: list(links.receive(0.0)) or peer.pending())
    return [peer.hear(Pull)]


def _share(links: PeerLinks) -> int:
    """The bytes that one turn takes."""
    before = links.bytes_in
    list(links.receive(0.0))
    return links.bytes_in - before


def test_no_turn_takes_more_than_its_bytes_and_all_of_them_come(waiting: PeerLinks):
    shares: list[int] = []
    until(lambda: shares.append(_share(waiting)) or sum(shares) == 2 * BLOCKS_EACH * BLOCK_BYTES)
    assert max(shares) <= BYTES_PER_TURN_MAX + PIECE_BYTES


def test_peers_of_which_each_has_enough_for_a_turn_take_turns(waiting: PeerLinks, monkeypatch: pytest.MonkeyPatch):
    """One message is a turn's share here, so that it can be seen when each of them has that much there."""
    monkeypatch.setattr("kv_pool.peers.BYTES_PER_TURN_MAX", 1)
    inputs = [socket for socket in waiting.sockets() if socket.type == zmq.DEALER]
    begun: list[list[int]] = []
    for _ in range(2 * PIECES * (BLOCKS_EACH - 1)):
        until(lambda: all(socket.poll(0) for socket in inputs))
        begun.append([event.landing.fetch for event in waiting.receive(0.0) if isinstance(event, Arrival)])
    pause = [[]] * (2 * PIECES - 2)  # the other pieces of both
    assert begun in [[[first], [1 - first], *pause] * (BLOCKS_EACH - 1) for first in (0, 1)]
