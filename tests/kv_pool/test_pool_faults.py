"""Clients and nodes killed and frozen, ports fed with rubbish: everything comes back, and within its deadline."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from kv_pool.client import AcquireEnded, Miss, NodeLost, PoolClient, PoolUnavailableError
from kv_pool.transport.codec import TABLE
from tests.kv_pool.conftest import OpenSocket
from tests.kv_pool.pool_world import (
    BLOCK_TOKENS,
    Child,
    NodeProcess,
    chain,
    connect,
    get,
    key,
    put,
    reserve,
    until,
    wait_for,
)

CLIENT_DEAD_S = 3.0
BIG_SLOT_BYTES = 8 * 2**20


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    node = NodeProcess(client_dead_s=CLIENT_DEAD_S)
    yield node
    node.close()


@pytest.fixture
def client(node: NodeProcess) -> Iterator[PoolClient]:
    client = node.client()
    yield client
    client.close()


def hold(pipe: Any, endpoint: str) -> None:
    """A worker with two leases, two reservations and a waiting acquire; later commits one of them when told to."""
    client = connect(endpoint, "holder")
    get(client, chain(2))
    slots = reserve(client, chain(2, first=50))
    client.acquire(chain(1, first=90), wait=True, timeout_s=60.0)
    pipe.send("holds")
    while not pipe.poll(0.05):
        client.keepalive()
        client.poll(0.0)
    assert slots[0] is not None
    client.commit(slots[0], tokens=BLOCK_TOKENS, parent=None)
    pipe.send(type(wait_for(client, NodeLost)[-1]).__name__)
    pipe.recv()


@pytest.fixture
def holder(node: NodeProcess, client: PoolClient) -> Iterator[Child]:
    put(client, chain(3))
    child = Child(hold, node.local_endpoint)
    assert child.hear() == "holds"
    until(lambda: node.stats()["leases"] == 2, clients=(client,))
    assert node.stats()["slots_reserved"] == 2
    yield child
    child.close()


def test_a_killed_worker_gives_everything_back_at_once(node: NodeProcess, client: PoolClient, holder: Child):
    killed_at = time.monotonic()
    holder.signal(signal.SIGKILL)
    until(lambda: node.stats()["clients"] == 1, clients=(client,))
    assert time.monotonic() - killed_at < CLIENT_DEAD_S
    stats = node.stats()
    assert (stats["leases"], stats["slots_reserved"], stats["slots_quarantined"], stats["acquires_waiting"]) == (0, 0, 0, 0)
    assert stats["slots_free"] == stats["slots_total"] - 3


def test_a_frozen_worker_loses_its_leases_but_nobody_gets_the_slots_it_may_write(
    node: NodeProcess, client: PoolClient, holder: Child
):
    holder.signal(signal.SIGSTOP)
    until(lambda: node.stats()["clients"] == 1, clients=(client,))
    stats = node.stats()
    assert (stats["leases"], stats["slots_reserved"], stats["slots_quarantined"], stats["acquires_waiting"]) == (0, 0, 2, 0)
    # It wakes and commits: refused, told so, and what it wrote is not visible.
    holder.pipe.send("go on")
    holder.signal(signal.SIGCONT)
    assert holder.hear() == "NodeLost"
    until(lambda: node.stats()["slots_quarantined"] == 0, clients=(client,))
    assert node.stats()["slots_free"] == stats["slots_total"] - 3
    assert get(client, chain(1, first=50))[1].miss is Miss.NOT_FOUND


def test_a_worker_killed_while_frozen_gives_its_slots_back(node: NodeProcess, client: PoolClient, holder: Child):
    holder.signal(signal.SIGSTOP)
    until(lambda: node.stats()["slots_quarantined"] == 2, clients=(client,))
    holder.signal(signal.SIGKILL)
    until(lambda: node.stats()["slots_quarantined"] == 0, clients=(client,))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_freezes_is_noticed_in_time(node: NodeProcess, client: PoolClient, how: signal.Signals):
    client.acquire(chain(1), wait=True, timeout_s=60.0)
    client.poll(0.1)
    at = time.monotonic()
    node.signal(how)
    wait_for(client, NodeLost, within_s=10 * CLIENT_DEAD_S)
    assert time.monotonic() - at < CLIENT_DEAD_S + 0.7
    with pytest.raises(PoolUnavailableError):
        connect(node.local_endpoint, timeout_s=0.3)


def test_a_node_killed_with_everything_open_leaves_nothing_in_shared_memory(node: NodeProcess, client: PoolClient):
    before = set(os.listdir("/dev/shm"))
    put(client, chain(3))
    node.signal(signal.SIGKILL)
    wait_for(client, NodeLost)
    client.close()
    assert set(os.listdir("/dev/shm")) <= before


# --- peers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "miss", "timeout_s"), [(signal.SIGKILL, Miss.LOST, 30.0), (signal.SIGSTOP, Miss.LATE, 3.0)])
def test_a_peer_that_goes_in_the_middle_of_a_fetch_ends_it_in_time(how: signal.Signals, miss: Miss, timeout_s: float):
    """Blocks of 8 MiB and two at a time: many are still to come when the first are here. One that is killed is noticed at once,
    one that freezes costs the acquire its deadline (its silence would be noticed later)."""
    near = NodeProcess("node-a", slot_bytes=BIG_SLOT_BYTES, fetch_inflight_blocks=2, client_dead_s=6.0)
    far = NodeProcess("node-b", slot_bytes=BIG_SLOT_BYTES, fetch_inflight_blocks=2, client_dead_s=6.0)
    reader, writer = near.client(), far.client()
    try:
        put(writer, chain(12))
        get(writer, chain(12))  # the commits are through
        reader.acquire(chain(13), wait=True, sources=[far.source], timeout_s=timeout_s)
        until(lambda: near.stats()["bytes_in"] > 0)
        at = time.monotonic()
        far.signal(how)
        end = next(e for e in wait_for(reader, AcquireEnded, within_s=15.0) if isinstance(e, AcquireEnded))
        assert time.monotonic() - at < 15.0
        assert end.available <= 12
        assert end.miss is miss

        def nothing_held() -> bool:
            stats = near.stats()
            held = stats["fetches"], stats["slots_reserved"], stats["acquires_waiting"]
            return held == (0, 0, 0) and stats["slots_free"] == stats["slots_total"] - end.available

        until(nothing_held, clients=(reader,))
    finally:
        for client in (reader, writer):
            client.close()
        for node in (near, far):
            node.close()


def test_a_reading_node_that_freezes_gives_the_source_its_leases_back():
    near = NodeProcess("node-a", slot_bytes=BIG_SLOT_BYTES, fetch_inflight_blocks=2, client_dead_s=CLIENT_DEAD_S)
    far = NodeProcess("node-b", slot_bytes=BIG_SLOT_BYTES, fetch_inflight_blocks=2, client_dead_s=CLIENT_DEAD_S)
    reader, writer = near.client(), far.client()
    try:
        put(writer, chain(12))
        reader.acquire(chain(13), wait=True, sources=[far.source], timeout_s=30.0)
        until(lambda: far.stats()["clients"] == 2, clients=(writer,))
        near.signal(signal.SIGSTOP)
        until(lambda: far.stats()["clients"] == 1, clients=(writer,))
        assert (far.stats()["leases"], far.stats()["acquires_waiting"]) == (0, 0)
    finally:
        for client in (reader, writer):
            client.close()
        for node in (near, far):
            node.close()


# --- rubbish -----------------------------------------------------------------------------------------------------------------


def test_rubbish_at_its_ports_does_not_hurt_a_node(node: NodeProcess, client: PoolClient, open_socket: OpenSocket):
    """Raw TCP noise, frames of noise, and maps that are nearly messages, while a worker goes on working."""
    seed = 20261201
    noise = random.Random(seed)
    dealer = open_socket(zmq.DEALER)
    dealer.connect(node.endpoint)
    values = [None, True, -1, 2**64 - 1, 0.5, float("nan"), b"", b"k" * 16, "x" * 300, [], [b"k" * 16] * 3, {}, [["a", "b"]]]
    sent = 0
    for turn in range(60):
        for endpoint in (node.endpoint, node.events_endpoint):
            host, port = endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(noise.randbytes(noise.randrange(1, 400)))
        for _ in range(10):
            dealer.send_multipart([noise.randbytes(noise.randrange(0, 200)) for _ in range(noise.randrange(1, 4))])
            op, (_, table) = noise.choice(sorted((op, row) for op, row in TABLE.items() if op != "hello"))
            message = {"op": op, "inc": node.incarnation} | {name: noise.choice(values) for name in table}
            dealer.send(msgpack.packb(message))
            sent += 2
        if turn % 20 == 0:
            put(client, chain(1, first=1000 + turn))
            client.keepalive()
    answers = 0
    deadline = time.monotonic() + 10
    while answers < sent and time.monotonic() < deadline:
        if dealer.poll(200):
            dealer.recv_multipart()
            answers += 1
    assert answers == sent, f"seed {seed}"
    stats = node.stats()
    assert stats["turns_failed"] == 0
    assert stats["malformed"] > sent // 2
    assert stats["slots_committed"] == 3
    assert (stats["slots_reserved"], stats["leases"]) == (0, 0)
    assert len(get(client, [key(1000)])[0]) == 1


def test_a_peer_that_talks_nonsense_is_dropped(node: NodeProcess, client: PoolClient, open_socket: OpenSocket):
    router = open_socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1", min_port=20000, max_port=30000)
    source = type("Peer", (), {"node_id": "liar", "endpoint": f"tcp://127.0.0.1:{port}"})()
    client.acquire(chain(1), wait=False, sources=[source], timeout_s=10.0)
    assert router.poll(5000)
    name = router.recv_multipart()[0]
    router.send_multipart([name, msgpack.packb({"op": "granted", "inc": "x", "ticket": 1, "position": 0, "grants": [[1]]}), b"?"])
    end = wait_for(client, AcquireEnded)[-1]
    assert isinstance(end, AcquireEnded)
    assert end.miss is Miss.LOST
    assert node.stats()["slots_free"] == node.stats()["slots_total"]
