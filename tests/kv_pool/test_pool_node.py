"""A node and its clients in one process: what a worker sees, what a peer sees, what is left afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection

import msgpack
import pytest
import zmq

from kv_pool.client import AcquireEnded, Granted, Miss, PoolClient, PoolUnavailableError, ReserveRefused, Tier
from kv_pool.service import SLOTS_MIN, PoolNode
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.ssd.records import SsdFormatError
from kv_pool.transport.codec import HEADER_BYTES_MAX
from kv_pool.transport.sockets import PORT_MAX, PORT_MIN
from tests.kv_pool.conftest import OpenSocket
from tests.kv_pool.pool_world import (
    BLOCK_TOKENS,
    SLOT_BYTES,
    Source,
    chain,
    connect,
    content,
    get,
    key,
    put,
    reserve,
    until,
    wait_for,
)

SLOTS = 16


def make_node(node_id: str = "node-a", *, slots: int = SLOTS, ssd: SsdSettings | None = None, **settings: object) -> PoolNode:
    limits = PoolSettings(dram=str(slots * SLOT_BYTES), **settings)  # type: ignore[arg-type]
    return PoolNode(node_id=node_id, slot_bytes=SLOT_BYTES, settings=limits, ssd=ssd, block_tokens=BLOCK_TOKENS)


@pytest.fixture
def node() -> Iterator[PoolNode]:
    node = make_node()
    node.start()
    yield node
    node.stop()


@pytest.fixture
def peer() -> Iterator[PoolNode]:
    peer = make_node("node-b")
    peer.start()
    yield peer
    peer.stop()


@pytest.fixture
def client(node: PoolNode) -> Iterator[PoolClient]:
    client = connect(node.local_endpoint)
    yield client
    client.close()


def source_of(node: PoolNode) -> Source:
    return Source(node.node_id, node.endpoint)


def test_what_one_worker_puts_another_gets(node: PoolNode, client: PoolClient):
    put(client, chain(3))
    other = connect(node.local_endpoint, "other")
    blocks, end = get(other, chain(4))
    assert [bytes(block.buffer) for block in blocks] == [content(k) for k in chain(3)]
    assert all(block.verify() and block.tier is Tier.DRAM and block.tokens == BLOCK_TOKENS for block in blocks)
    assert (end.available, end.miss) == (3, Miss.NOT_FOUND)
    with pytest.raises(TypeError):
        blocks[0].buffer[0] = 1
    for block in blocks:
        other.release([block.lease])
    until(lambda: node.stats()["leases"] == 0)
    other.close()


def test_a_tail_carries_only_its_meta_and_is_gone_once_read(node: PoolNode, client: PoolClient):
    (slot,) = reserve(client, [key(1)], private=True)
    assert slot is not None
    client.commit(slot, tokens=0, parent=None, meta=b"first token")
    ((block,), _) = get(client, [key(1)])
    assert (block.meta, len(block.buffer), block.tokens, block.verify()) == (b"first token", 0, 0, True)
    client.release([block.lease], consume=True)
    until(lambda: node.stats()["slots_free"] == SLOTS)


def test_a_byte_flipped_in_the_arena_is_seen_by_the_reader(node: PoolNode, client: PoolClient):
    put(client, chain(1))
    ((block,), _) = get(client, chain(1))
    assert block.verify()
    for slot in range(SLOTS):  # whichever it is
        node._arena.slot(slot)[SLOT_BYTES // 2] ^= 1
    assert not block.verify()
    assert block.still_held()


def test_a_slot_given_to_another_is_seen_by_a_reader_whose_lease_ended(node: PoolNode, client: PoolClient):
    put(client, chain(1))
    ((block,), _) = get(client, chain(1))
    client.release([block.lease])
    for i in range(SLOTS):
        put(client, [key(100 + i)])
    until(lambda: not block.still_held())
    assert not block.verify()


def test_a_slot_that_is_free_again_is_nobodys_though_its_bytes_are_still_right(node: PoolNode, client: PoolClient):
    put(client, [key(1)], private=True)
    ((block,), _) = get(client, [key(1)])
    assert block.verify()
    client.release([block.lease], consume=True)
    until(lambda: node.stats()["slots_free"] == SLOTS)
    assert bytes(block.buffer) == content(key(1))
    assert not block.verify()


def test_a_writer_waits_for_room_and_is_told_when_there_is_none(node: PoolNode, client: PoolClient):
    put(client, chain(SLOTS))
    blocks, _ = get(client, chain(SLOTS))
    start = time.monotonic()
    client.reserve([key(999)], timeout_s=0.3)
    assert isinstance(wait_for(client, ReserveRefused)[-1], ReserveRefused)
    assert 0.25 < time.monotonic() - start < 2.0
    client.reserve([key(999)], timeout_s=5.0)
    client.release([blocks[-1].lease])
    until(lambda: node.stats()["evictions"] == 1, clients=(client,))


def test_a_waiting_acquire_ends_at_its_deadline_not_at_the_next_tick(client: PoolClient):
    start = time.monotonic()
    _, end = get(client, chain(1), wait=True, timeout_s=0.1)
    assert end.miss is Miss.LATE
    assert 0.09 < time.monotonic() - start < 1.0


def test_a_commit_that_cannot_be_costs_that_block_only(node: PoolNode, client: PoolClient):
    (slot,) = reserve(client, [key(1)])
    assert slot is not None
    client.commit(slot, tokens=BLOCK_TOKENS - 1, parent=None)
    put(client, chain(1, first=2))
    _, end = get(client, chain(1, first=1))
    assert end.miss is Miss.NOT_FOUND
    assert len(get(client, chain(1, first=2))[0]) == 1


# --- connecting --------------------------------------------------------------------------------------------------------------


def test_a_client_without_a_node_is_told_in_time():
    client = PoolClient("unix:@nobody", client_id="w", block_bytes=1)
    start = time.monotonic()
    with pytest.raises(PoolUnavailableError, match="refused"):
        client.connect(0.2)
    client.close()
    assert time.monotonic() - start < 2.0


def test_blocks_larger_than_slots_are_refused_when_connecting(node: PoolNode):
    client = PoolClient(node.local_endpoint, client_id="w", block_bytes=SLOT_BYTES + 1)
    with pytest.raises(PoolUnavailableError, match="cannot hold"):
        client.connect(5.0)
    client.close()


def test_too_little_memory_names_the_setting():
    with pytest.raises(ValueError, match=r"pool\.dram"):
        make_node(slots=SLOTS_MIN - 1)


def test_only_loopback_ports_of_our_range_are_bound(node: PoolNode):
    for endpoint in (node.endpoint, node.events_endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        assert host == "127.0.0.1"
        assert PORT_MIN <= int(port) < PORT_MAX


def resources() -> tuple[list[str], int, int, int]:
    """Of this process: descriptors by what they stand for, threads of the interpreter and of zmq, mappings of an arena."""
    with open("/proc/self/maps") as file:
        maps = file.read().count("moonpool-arena")
    kinds: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            kinds.append(os.readlink(f"/proc/self/fd/{fd}").split(":[")[0])
    return sorted(kinds), threading.active_count(), len(os.listdir("/proc/self/task")), maps


def test_stop_leaves_no_descriptor_thread_or_mapping():
    def round_trip() -> None:
        nodes = [make_node("node-a"), make_node("node-b")]
        for node in nodes:
            node.start()
        clients = [connect(node.local_endpoint) for node in nodes]
        put(clients[0], chain(4))
        assert len(get(clients[1], chain(4), source=source_of(nodes[0]))[0]) == 4
        for client in clients:
            client.close()
        for node in nodes:
            node.stop()
            node.stop()
        make_node("never-started").stop()

    round_trip()  # what zmq sets up once for the process
    before = resources()
    round_trip()
    until(lambda: resources() == before)


def test_a_node_that_its_ssd_directory_refuses_leaves_no_socket_thread_descriptor_or_mapping(tmp_path: Path):
    (tmp_path / "FORMAT").write_text("{")
    ssd = SsdSettings(directory=str(tmp_path), capacity="4MiB", segment="1MiB", batch="512KiB")
    nodes: list[PoolNode] = []

    def refused() -> PoolNode:
        nodes.append(make_node(ssd=ssd))
        with pytest.raises(SsdFormatError):
            nodes[-1].start()
        return nodes[-1]

    try:
        refused()  # what zmq sets up once for the process
        before = resources()
        node = refused()
        until(lambda: resources() == before)
        for endpoint in (node.endpoint, node.events_endpoint):
            host, port = endpoint.removeprefix("tcp://").split(":")
            with pytest.raises(ConnectionRefusedError):
                create_connection((host, int(port)), timeout=5.0)
        client = PoolClient(node.local_endpoint, client_id="w", block_bytes=SLOT_BYTES)
        with pytest.raises(PoolUnavailableError, match="refused"):
            client.connect(0.2)
        client.close()
    finally:
        for node in nodes:
            node.stop()  # which costs nothing where it was stopped
    assert (tmp_path / "FORMAT").read_text() == "{"


# --- peers -------------------------------------------------------------------------------------------------------------------


def test_a_chain_longer_than_the_window_comes_from_a_peer_once(node: PoolNode, peer: PoolNode, client: PoolClient):
    far = connect(peer.local_endpoint)
    put(far, chain(12))
    blocks, end = get(client, chain(13), source=source_of(peer))
    assert (end.available, end.miss) == (12, Miss.NOT_FOUND)
    assert [bytes(block.buffer) for block in blocks] == [content(k) for k in chain(12)]
    assert {block.tier for block in blocks} == {Tier.REMOTE_DRAM}
    again, _ = get(client, chain(12), source=source_of(peer))
    assert {block.tier for block in again} == {Tier.DRAM}
    assert peer.stats()["bytes_out"] == node.stats()["bytes_in"] == 12 * SLOT_BYTES
    (pulled,) = node.take_pulls()
    assert (pulled.node_id, pulled.bytes, node.take_pulls()) == ("node-b", 12 * SLOT_BYTES, [])
    assert 0 < pulled.seconds < 10
    until(lambda: peer.stats()["leases"] == 0)
    far.close()


def test_two_workers_that_want_the_same_cause_one_transfer(node: PoolNode, peer: PoolNode, client: PoolClient):
    far, other = connect(peer.local_endpoint), connect(node.local_endpoint)
    tickets = [c.acquire(chain(6), wait=True, sources=[source_of(peer)], timeout_s=10.0) for c in (client, other)]
    put(far, chain(6))
    for c, ticket in zip((client, other), tickets, strict=True):
        end = wait_for(c, AcquireEnded)[-1]
        assert end == AcquireEnded(ticket, 6, None)
    assert node.stats()["bytes_in"] == 6 * SLOT_BYTES
    far.close()
    other.close()


def test_blocks_of_a_prompt_arrive_while_later_ones_are_still_computed(peer: PoolNode, client: PoolClient):
    far = connect(peer.local_endpoint)
    client.acquire(chain(2), wait=True, sources=[source_of(peer)], timeout_s=10.0)
    put(far, chain(1))
    (granted,) = [e for e in wait_for(client, Granted) if isinstance(e, Granted)]
    assert granted.position == 0
    put(far, chain(1, first=2), parent=key(1))
    assert wait_for(client, AcquireEnded)[-1] == AcquireEnded(granted.ticket, 2, None)
    far.close()


def test_a_tail_moves_to_the_node_of_its_reader(node: PoolNode, peer: PoolNode, client: PoolClient):
    far = connect(peer.local_endpoint)
    put(far, [key(1)], private=True, meta=b"first token")
    ((block,), _) = get(client, [key(1)], wait=True, source=source_of(peer))
    assert block.meta == b"first token"
    until(lambda: peer.stats()["slots_free"] == SLOTS)
    client.release([block.lease], consume=True)
    until(lambda: node.stats()["slots_free"] == SLOTS)
    far.close()


def test_a_block_spoiled_at_the_peer_is_a_typed_miss_and_never_stored(node: PoolNode, peer: PoolNode, client: PoolClient):
    far = connect(peer.local_endpoint)
    put(far, chain(2))
    ((first, second), _) = get(far, chain(2))
    peer._arena.slot(second._grant.slot)[0] ^= 1
    _, end = get(client, chain(2), source=source_of(peer))
    assert (end.available, end.miss) == (1, Miss.CORRUPT)
    assert node.stats()["corrupt"] == 1
    assert node.stats()["slots_free"] == SLOTS - 1
    assert first.still_held()
    far.close()


def test_a_source_that_is_not_there_is_a_typed_miss_within_the_deadline(node: PoolNode, client: PoolClient):
    start = time.monotonic()
    _, end = get(client, chain(2), source=Source("nobody", "tcp://127.0.0.1:29997"), timeout_s=0.5)
    assert end.miss in (Miss.LATE, Miss.LOST)
    assert time.monotonic() - start < 2.0
    assert node.stats()["fetches"] == 0


# --- bad input ---------------------------------------------------------------------------------------------------------------


def test_malformed_messages_get_a_typed_answer_and_change_nothing(node: PoolNode, client: PoolClient, open_socket: OpenSocket):
    put(client, chain(1))
    socket = open_socket(zmq.DEALER)
    socket.connect(node.endpoint)
    bad = [[b""], [b"\xc1"], [msgpack.packb({"op": "nonsense", "inc": ""})], [msgpack.packb([1, 2])], [b"a", b"b"], []]
    bad.append([b"\xff" * (HEADER_BYTES_MAX + 1)])
    for frames in bad:
        socket.send_multipart(frames or [b""])
        assert socket.poll(5000)
        assert msgpack.unpackb(socket.recv())["code"] == "malformed"
    stale = {"op": "keepalive", "inc": "another"}
    socket.send(msgpack.packb(stale))
    assert msgpack.unpackb(socket.recv())["code"] == "stale_incarnation"
    socket.send(msgpack.packb(stale | {"inc": node.incarnation}))
    assert msgpack.unpackb(socket.recv())["code"] == "unknown_client"
    assert node.stats()["malformed"] == len(bad)
    assert len(get(client, chain(1))[0]) == 1


def test_a_frame_over_the_sockets_limit_costs_its_sender_the_connection(
    node: PoolNode, client: PoolClient, open_socket: OpenSocket
):
    socket = open_socket(zmq.DEALER)
    socket.connect(node.endpoint)
    socket.send(b"x" * (2 * 2**20))
    assert not socket.poll(200)
    put(client, chain(1))
    assert node.stats()["malformed"] == 0


def test_a_client_of_another_incarnation_learns_that_its_node_is_lost(node: PoolNode, client: PoolClient):
    client._incarnation = "of the node before"
    client.keepalive()
    until(lambda: any(type(e).__name__ == "NodeLost" for e in client.poll(0.05)))
