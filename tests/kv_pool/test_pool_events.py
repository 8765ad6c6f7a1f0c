"""What a node tells of its blocks: batches without a gap, replay of the latest, a snapshot of all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kv_pool.client import PoolClient
from kv_pool.events import publisher as publisher_module
from kv_pool.events.codec import MalformedEventError, decode_batch, encode_batch
from kv_pool.events.replay import EventsGoneError, fetch_events
from kv_pool.events.snapshot import SnapshotError, fetch_snapshot
from kv_pool.events.types import DRAM, SSD, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings
from tests.kv_pool.conftest import OpenSocket
from tests.kv_pool.pool_world import BLOCK_TOKENS, SLOT_BYTES, chain, connect, get, key, put, until

SLOTS = 8
BATCH = EventBatch(
    7,
    "node@with@signs",
    "incarnation",
    12.5,
    (BlockStored((key(1), key(2)), None, 64, DRAM), BlockStored((key(3),), key(2), 64, DRAM), BlockRemoved((key(3),), DRAM)),
)


def apply(batches: list[EventBatch], known: set[BlockKey] | None = None) -> set[BlockKey]:
    """What a reader knows after ``batches``."""
    known = set(known or ())
    for event in [event for batch in batches for event in batch.events]:
        match event:
            case BlockStored(keys=keys):
                known |= set(keys)
            case BlockRemoved(keys=keys):
                known -= set(keys)
            case AllBlocksCleared():
                known.clear()
    return known


@pytest.fixture
def node() -> Iterator[PoolNode]:
    node = PoolNode(node_id="node-a", slot_bytes=SLOT_BYTES, settings=PoolSettings(dram=str(SLOTS * SLOT_BYTES)))
    node.start()
    yield node
    node.stop()


@pytest.fixture
def client(node: PoolNode) -> Iterator[PoolClient]:
    client = connect(node.local_endpoint)
    yield client
    client.close()


@pytest.fixture
def reader(node: PoolNode, open_socket: OpenSocket) -> zmq.Socket[bytes]:
    socket = open_socket(zmq.SUB)
    socket.subscribe(b"kv@node-a@")
    socket.connect(node.events_endpoint)
    return socket


def test_a_batch_is_three_frames_in_the_form_of_vllm():
    topic, sequence, payload = encode_batch(BATCH)
    assert topic == b"kv@node@with@signs@incarnation"
    assert sequence == (7).to_bytes(8, "big")
    assert decode_batch([topic, sequence, payload]) == BATCH


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"kv@a@b"],
        [b"other@a@b", bytes(8), b"\x93\x00\x90\x00"],
        [b"kv@ab", bytes(8), b"\x93\x00\x90\x00"],
        [b"kv@a@b", bytes(7), b"\x93\x00\x90\x00"],
        [b"kv@a@b", bytes(8), b"\xc1"],
        [b"kv@a@b", bytes(8), b"\x93\x00\x91\x91\xa3xyz\x00"],
    ],
)
def test_anything_else_is_malformed(frames: list[bytes]):
    with pytest.raises(MalformedEventError):
        decode_batch(frames)


def test_events_replay_and_snapshot_tell_the_same(node: PoolNode, client: PoolClient, reader: zmq.Socket[bytes]):
    heard: list[EventBatch] = []

    def listen() -> bool:
        while reader.poll(0):
            heard.append(decode_batch(reader.recv_multipart()))
        return bool(heard)

    numbers = iter(range(10_000, 20_000))

    def until_subscribed() -> bool:
        put(client, [key(next(numbers))], private=True)  # of private blocks nobody hears
        put(client, [key(next(numbers))])
        return listen()

    until(until_subscribed, clients=(client,))
    for number in range(0, 6 * SLOTS, 3):
        put(client, chain(3, first=100 + number))
    get(client, chain(1, first=1))
    last = fetch_snapshot(node.endpoint, 5.0)
    until(lambda: (listen(), heard[-1].sequence == last.sequence)[1], clients=(client,))
    assert [batch.sequence for batch in heard] == list(range(heard[0].sequence, last.sequence + 1))
    replayed = fetch_events(node.endpoint, 0, 5.0)
    assert replayed[heard[0].sequence :] == heard
    assert [batch.sequence for batch in replayed] == list(range(last.sequence + 1))
    assert (last.node_id, last.incarnation) == ("node-a", node.incarnation)
    assert apply(replayed) == set(last.keys_by_medium[DRAM])
    assert {event.block_tokens for b in replayed for event in b.events if isinstance(event, BlockStored)} == {BLOCK_TOKENS}
    assert node.stats()["evictions"] > 0
    private = {key(i) for i in range(10_000, 20_000, 2)}
    assert not private & {k for b in replayed for e in b.events if not isinstance(e, AllBlocksCleared) for k in e.keys}


def test_a_snapshot_of_an_empty_node_and_a_replay_of_nothing(node: PoolNode):
    snapshot = fetch_snapshot(node.endpoint, 5.0)
    assert (snapshot.sequence, snapshot.keys_by_medium) == (-1, {DRAM: (), SSD: ()})
    with pytest.raises(EventsGoneError, match="not kept"):
        fetch_events(node.endpoint, 0, 5.0)


def test_no_more_than_the_limit_is_kept_for_replay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publisher_module, "BATCHES_KEPT_MAX", 3)
    with zmq.Context() as context:
        publisher = publisher_module.EventPublisher(context, "127.0.0.1", "n", "i")
        for i in range(5):
            publisher.add(BlockStored((key(i),), None, 64, DRAM))
            publisher.flush()
        publisher.close()
    assert publisher.since(1) is None
    assert [int.from_bytes(frames[1]) for frames in publisher.since(2) or []] == [2, 3, 4]
    assert publisher.since(5) is None


def test_nobody_there_is_an_error_in_time():
    with pytest.raises(SnapshotError, match="no answer"):
        fetch_snapshot("tcp://127.0.0.1:29996", 0.1)
    with pytest.raises(EventsGoneError, match="no answer"):
        fetch_events("tcp://127.0.0.1:29996", 0, 0.1)
