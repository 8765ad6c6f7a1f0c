"""Keys: who gets in, who is talked to, and what refuses to start without them. CURVE works on loopback as it does elsewhere."""

from __future__ import annotations

import socket as sockets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import typer
import xxhash
import zmq
from pydantic import ValidationError
from typer.testing import CliRunner

from cluster.cli.pool_keys import register
from kv_pool.events.codec import decode_batch
from kv_pool.events.replay import EventsGoneError, fetch_events
from kv_pool.events.snapshot import SnapshotError, fetch_snapshot
from kv_pool.events.types import AllBlocksCleared
from kv_pool.heartbeat import HeartbeatSender
from kv_pool.node.messages import Acquire, AskSnapshot, Commit, Hello, Peer, Reserve, SlotsReserved
from kv_pool.node.stimuli import Action, Asked, Send
from kv_pool.service import PoolNode
from kv_pool.settings import CurveSettings, PoolSettings
from kv_pool.transport import process
from kv_pool.transport.codec import decode, encode
from kv_pool.transport.curve import (
    ConnectionRefusedByPolicyError,
    CurveKeyError,
    CurveKeys,
    Gatekeeper,
    address_of,
    connect,
    is_loopback,
    make_pair,
)
from kv_pool.transport.pieces import PIECE_BYTES
from kv_pool.transport.sockets import bind, make_socket
from tests.kv_pool.conftest import OpenSocket
from tests.kv_pool.pool_world import BLOCK_TOKENS, chain, content, until

SLOTS = 8
BLOCK_BYTES = 2 * PIECE_BYTES + 77
SILENT_MS = 400
"""So long a refused one waits for the answer that must not come."""


def pair(where: Path, *allowed: Path) -> CurveSettings:
    """A new pair in ``where``, that lets in the pairs in ``allowed``."""
    make_pair(where)
    lets_in = where / "allowed"
    lets_in.mkdir()
    for other in allowed:
        (lets_in / f"{other.name}.key").write_bytes((other / "pool.key").read_bytes())
    return CurveSettings(secret_key_file=str(where / "pool.key_secret"), allowed_keys=str(lets_in) if allowed else "")


def make_node(node_id: str, curve: CurveSettings, **more: Any) -> PoolNode:
    settings = PoolSettings(
        dram=str(SLOTS * BLOCK_BYTES), curve_secret_key_file=curve.secret_key_file, curve_allowed_keys=curve.allowed_keys, **more
    )
    return PoolNode(node_id=node_id, slot_bytes=BLOCK_BYTES, settings=settings, block_tokens=BLOCK_TOKENS)


def keys_of(curve: CurveSettings) -> CurveKeys:
    keys = CurveKeys.load(curve)
    assert keys is not None
    return keys


@pytest.fixture
def ours(tmp_path: Path) -> CurveSettings:
    return pair(tmp_path / "ours")


@pytest.fixture
def node(ours: CurveSettings) -> Iterator[PoolNode]:
    node = make_node("node-a", ours)
    write(node, 3)
    node.start()
    yield node
    assert node.stats()["turns_failed"] == 0
    node.stop()


def write(node: PoolNode, count: int) -> None:
    """Committed blocks in a node that has not started, as its own workers would have written them."""
    pid, started = process.own()
    node._state.handle(Asked("77", Hello(pid, started)), 0.0)
    for ticket, k in enumerate(chain(count), start=1):
        data = content(k, BLOCK_BYTES)
        actions = node._state.handle(Asked("77", Reserve(ticket, (k,), None, 1.0, False)), 0.0)
        (slot,) = next(a.answer.slots for a in actions if isinstance(a, Send) and isinstance(a.answer, SlotsReserved))
        assert slot is not None
        node._arena.slot(slot)[:] = data
        commit = Commit(slot, k, None, BLOCK_TOKENS, BLOCK_BYTES, xxhash.xxh3_64_intdigest(data), b"")
        do(node, node._state.handle(Asked("77", commit), 0.0))


def do(node: PoolNode, actions: list[Action]) -> None:
    node._effects.do([a for a in actions if not isinstance(a, Send)], time.monotonic())


def test_a_block_travels_between_nodes_that_know_each_other(tmp_path: Path):
    """Each with a pair of its own, on the other's list."""
    make_pair(tmp_path / "a")
    make_pair(tmp_path / "b")
    a = CurveSettings(secret_key_file=str(tmp_path / "a/pool.key_secret"), allowed_keys=str(tmp_path / "b/pool.key"))
    b = CurveSettings(secret_key_file=str(tmp_path / "b/pool.key_secret"), allowed_keys=str(tmp_path / "a/pool.key"))
    far, near = make_node("far", b), make_node("near", a)
    write(far, 3)
    pull_into(near, far)
    try:
        until(lambda: near.stats()["slots_committed"] == 3)
        assert near.stats()["bytes_in"] == far.stats()["bytes_out"] == 3 * BLOCK_BYTES
        assert near.stats()["corrupt"] == 0
    finally:
        near.stop()
        far.stop()


def pull_into(near: PoolNode, far: PoolNode) -> None:
    """Start both, with the first three blocks wanted at ``near``."""
    pid, started = process.own()
    now = time.monotonic()
    for number, k in enumerate(chain(3), start=1):  # a reader each: no answer reaches them, so they are gone after their first
        name = f"{number:02x}"
        near._state.handle(Asked(name, Hello(pid, started)), now)
        do(near, near._state.handle(Asked(name, Acquire(1, (k,), False, 10.0, (Peer("far", far.endpoint),))), now))
    far.start()
    near.start()


@pytest.mark.parametrize("who", ["the source", "the reader"])
def test_no_block_travels_where_one_does_not_know_the_other(tmp_path: Path, who: str):
    make_pair(tmp_path / "a")
    make_pair(tmp_path / "b")
    to_a, to_b = str(tmp_path / "a/pool.key"), str(tmp_path / "b/pool.key")
    a = CurveSettings(secret_key_file=str(tmp_path / "a/pool.key_secret"), allowed_keys="" if who == "the reader" else to_b)
    b = CurveSettings(secret_key_file=str(tmp_path / "b/pool.key_secret"), allowed_keys="" if who == "the source" else to_a)
    far, near = make_node("far", b), make_node("near", a, client_dead_s=0.6, lease_s=1.0)
    write(far, 3)
    pull_into(near, far)
    try:
        until(lambda: near.stats()["fetches"] == 0)
        assert (near.stats()["slots_free"], near.stats()["bytes_in"], far.stats()["bytes_out"]) == (SLOTS, 0, 0)
    finally:
        near.stop()
        far.stop()


def test_questions_are_answered_to_those_with_a_key(node: PoolNode, ours: CurveSettings, tmp_path: Path):
    keys = keys_of(ours)
    snapshot = fetch_snapshot(node.endpoint, 5.0, keys)
    assert snapshot.keys_by_medium["dram"] == tuple(chain(3))
    assert [batch.sequence for batch in fetch_events(node.endpoint, 0, 5.0, keys)] == list(range(snapshot.sequence + 1))
    stranger = keys_of(pair(tmp_path / "stranger", tmp_path / "ours"))  # it knows the node, the node does not know it
    for wrong in (None, keys_of(pair(tmp_path / "nobody")), stranger):
        with pytest.raises(SnapshotError):
            fetch_snapshot(node.endpoint, SILENT_MS / 1000, wrong)
        with pytest.raises(EventsGoneError):
            fetch_events(node.endpoint, 0, SILENT_MS / 1000, wrong)
    fetch_snapshot(node.endpoint, 5.0, keys)


def test_events_are_heard_by_those_with_a_key_only(ours: CurveSettings, open_socket: OpenSocket):
    node = make_node("node-a", ours)
    friend, plain = open_socket(zmq.SUB), open_socket(zmq.SUB)
    for subscriber in (friend, plain):
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
    connect(friend, node.events_endpoint, keys_of(ours))
    plain.connect(address_of(node.events_endpoint))
    try:
        publish_until(node, friend)
        assert decode_batch(friend.recv_multipart()).node_id == "node-a"
        assert not plain.poll(SILENT_MS)
    finally:
        node.stop()


def publish_until(node: PoolNode, subscriber: zmq.Socket[bytes]) -> None:
    """Publish from a node that has not started, until the subscription is through."""

    def heard() -> int:
        node._events.add(AllBlocksCleared())
        node._events.flush()
        return subscriber.poll(10)

    until(heard)


def test_somebody_without_a_key_gets_no_answer_and_costs_nothing(node: PoolNode, ours: CurveSettings, open_socket: OpenSocket):
    plain = open_socket(zmq.DEALER)
    plain.connect(address_of(node.endpoint))
    plain.send(encode(AskSnapshot(), ""))
    plain.send(encode(Hello(0, 0), ""))
    host, port = address_of(node.endpoint).removeprefix("tcp://").split(":")
    with sockets.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"\xff" * 5000)
    assert not plain.poll(SILENT_MS)
    assert (node.stats()["clients"], node.stats()["malformed"], node.stats()["commits"]) == (0, 0, 3)
    assert fetch_snapshot(node.endpoint, 5.0, keys_of(ours)).node_id == "node-a"


def test_heartbeats_go_to_a_scheduler_with_a_key(ours: CurveSettings):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = keys_of(ours)
    gatekeeper = Gatekeeper(context, keys)
    router = make_socket(context, zmq.ROUTER)
    endpoint = bind(router, "127.0.0.1", keys)
    heard = threading.Event()
    sender = HeartbeatSender(
        resolve=lambda: endpoint, payload=lambda: {"v": 1}, on_reply=lambda _: heard.set(), period_s=0.1, keys=keys
    )
    sender.start()
    try:
        assert router.poll(5000)
        name, payload = router.recv_multipart()
        assert msgpack.unpackb(payload) == {"v": 1}
        router.send_multipart([name, msgpack.packb({})])
        assert heard.wait(5)
    finally:
        sender.stop()
        router.close(0)
        gatekeeper.close()
        context.term()


# --- what refuses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "node7.example", "::"])
def test_a_node_off_loopback_without_keys_does_not_start_and_says_what_is_missing(host: str):
    with pytest.raises(CurveKeyError, match=r"pool\.host: .* pool\.curve_secret_key_file"):
        make_node("node-a", CurveSettings(), host=host)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("[::1]", True), ("192.168.0.1", False), ("x.org", False)],
)
def test_what_loopback_is(host: str, expected: bool):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.1:20000", "tcp://127.0.0.1:20000?key=zz", f"tcp://127.0.0.1:20000?key={'ab' * 32}"]
)
def test_endpoints_that_are_not_talked_to(endpoint: str, ours: CurveSettings, open_socket: OpenSocket):
    with pytest.raises(ConnectionRefusedByPolicyError):
        connect(open_socket(zmq.DEALER), endpoint, keys_of(ours))


def test_a_keyed_endpoint_is_part_of_the_protocol(node: PoolNode):
    acquire = Acquire(1, tuple(chain(1)), False, 1.0, (Peer("node-a", node.endpoint),))
    assert decode(encode(acquire, "i"), frozenset({"acquire"}))[0] == acquire
    assert "?key=" in node.endpoint
    assert "?key=" in node.events_endpoint


def test_key_files_that_cannot_be_used(tmp_path: Path):
    public, secret = make_pair(tmp_path)
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no key in here")
    nonsense.chmod(0o600)
    empty = tmp_path / "empty"
    empty.mkdir()
    for settings, message in [
        (CurveSettings(secret_key_file=str(tmp_path / "absent")), "No such file"),
        (CurveSettings(secret_key_file=str(nonsense)), "no key file"),
        (CurveSettings(secret_key_file=str(secret), allowed_keys=str(empty)), "0 files"),
        (CurveSettings(secret_key_file=str(secret), allowed_keys=str(nonsense)), "no key file"),
        (CurveSettings(allowed_keys=str(public)), "needs pool.curve_secret_key_file"),
    ]:
        with pytest.raises(CurveKeyError, match=message):
            CurveKeys.load(settings)
    public.chmod(0o600)
    with pytest.raises(CurveKeyError, match="no secret key"):
        CurveKeys.load(CurveSettings(secret_key_file=str(public)))
    secret.chmod(0o640)
    with pytest.raises(CurveKeyError, match="chmod 600"):
        CurveKeys.load(CurveSettings(secret_key_file=str(secret)))
    assert CurveKeys.load(CurveSettings()) is None
    with pytest.raises(ValidationError):
        CurveSettings(unknown="x")  # type: ignore[call-arg]


def test_a_secret_is_in_no_text_about_keys(ours: CurveSettings):
    keys = keys_of(ours)
    assert keys.secret.decode() not in repr(keys) + str(keys)


def test_the_command_makes_a_pair_once(tmp_path: Path):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    target = tmp_path / "new" / "keys"
    result = CliRunner().invoke(app, ["keys", str(target)])
    assert result.exit_code == 0
    assert (target / "pool.key_secret").stat().st_mode & 0o777 == 0o600
    assert CurveKeys.load(CurveSettings(secret_key_file=str(target / "pool.key_secret"))) is not None
    secret = (target / "pool.key_secret").read_bytes()
    assert CliRunner().invoke(app, ["keys", str(target)]).exit_code == 1
    assert (target / "pool.key_secret").read_bytes() == secret
