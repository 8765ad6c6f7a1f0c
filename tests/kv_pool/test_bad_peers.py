"""Everything that a broken or malicious process can say to a node, at its port and as its peer: the node lives, its memory does
not grow, and nothing stays taken."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_pool.client import AcquireEnded, Granted, Miss, NodeLost, PoolClient
from kv_pool.node.messages import (
    Abandon,
    Alive,
    Cancel,
    Commit,
    Ended,
    ErrorCode,
    Goodbye,
    Hello,
    Keepalive,
    Pull,
    Refusal,
    Release,
    Request,
    Reserve,
    ReserveDenied,
    Stalled,
)
from kv_pool.transport.codec import ANSWERS, TABLE, MalformedMessageError, decode, encode
from kv_pool.transport.pieces import PIECE_BYTES
from tests.kv_pool.conftest import OpenSocket
from tests.kv_pool.played_peer import PlayedPeer, messages
from tests.kv_pool.pool_world import NodeProcess, Source, chain, content, get, key, put, until, wait_for

T = TypeVar("T")
BLOCK_BYTES = PIECE_BYTES + 5000
SLOTS = 16
SEED = 20261201
RSS_MARGIN_BYTES = 160 * 2**20
"""What malloc keeps for reuse (64 MiB a heap), and some more. What is thrown at the node is several times that."""
VALUES = [
    None,
    True,
    -1,
    0,
    2**63,
    2**64 - 1,
    0.5,
    float("nan"),
    b"",
    b"k" * 16,
    "x" * 300,
    [],
    [b"k" * 16] * 3,
    {},
    [["a", "b"]],
]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    node = NodeProcess("node-a", slot_bytes=BLOCK_BYTES, client_dead_s=5.0, lease_s=30.0)
    yield node
    node.close()


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> Iterator[PoolClient]:
    client = node.client()
    yield client
    client.close()


@contextlib.contextmanager
def playing() -> Iterator[PlayedPeer]:
    """A peer of its own for each story: what one has left on its link must not be the next one's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        yield PlayedPeer(router, BLOCK_BYTES)
    finally:
        router.close(0)
        context.term()


@pytest.fixture
def liar() -> Iterator[PlayedPeer]:
    with playing() as peer:
        yield peer


def own_memory(node: NodeProcess) -> int:
    """Bytes of the node's process without the arena, which is shared memory."""
    with open(f"/proc/{node.process.pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def healthy(node: NodeProcess, client: PoolClient) -> None:
    """Nothing is taken, no turn failed, and a worker can write and read."""
    client.keepalive()
    until(lambda: node.stats()["slots_reserved"] == node.stats()["fetches"] == 0, clients=(client,))
    k = key(random.Random(time.monotonic()).randrange(2**40, 2**41))
    put(client, [k])
    ((block,), _) = get(client, [k])
    assert bytes(block.buffer) == content(k, BLOCK_BYTES)
    client.release([block.lease])
    until(lambda: node.stats()["leases"] == 0, clients=(client,))
    stats = node.stats()
    assert stats["turns_failed"] == 0
    assert stats["slots_free"] + stats["slots_committed"] == SLOTS


# --- a peer that answers a pull ---------------------------------------------------------------------------------------------

Message = tuple[bytes, ...]


def wire(liar: PlayedPeer, pull: Pull) -> list[Message]:
    """What would be honest: two blocks and the end."""
    honest = [m for i, k in enumerate(pull.keys) for m in messages(pull, k, BLOCK_BYTES, position=i, lease=i + 1)]
    return [
        *((encode(header, liar.incarnation), bytes(piece)) for header, piece in honest),
        (encode(Ended(pull.ticket, len(pull.keys), None), liar.incarnation),),
    ]


def _flip(message: Message, at: int) -> Message:
    header = bytearray(message[0])
    header[at % len(header)] ^= 1 + at % 255
    return (bytes(header), *message[1:])


def _refield(message: Message, at: int) -> Message:
    fields = msgpack.unpackb(message[0])
    fields[sorted(fields)[at % len(fields)]] = VALUES[at % len(VALUES)]
    return (msgpack.packb(fields), *message[1:])


def _huge(message: Message, at: int) -> Message:
    """Counts and lengths that promise more than there is: array of 2^32 - 1, map of 2^32 - 1, text of 2^31."""
    lie = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\x80\x00\x00\x00")[at % 3]
    return (b"\x82\xa2op\xa5piece\xa5lease" + lie, *message[1:])


DEEDS: dict[str, Callable[[list[Message], int], list[Message]]] = {
    "leave out": lambda m, at: [*m[: at % len(m)], *m[at % len(m) + 1 :]],
    "repeat": lambda m, at: [*m[: at % len(m) + 1], *m[at % len(m) :]],
    "start over": lambda m, at: [*m[: at % len(m)], *m],
    "swap": lambda m, at: [*m[: at % len(m)], *reversed(m[at % len(m) :])],
    "flip a byte": lambda m, at: [*m[: at % len(m)], _flip(m[at % len(m)], at), *m[at % len(m) + 1 :]],
    "another value": lambda m, at: [*m[: at % len(m)], _refield(m[at % len(m)], at), *m[at % len(m) + 1 :]],
    "huge counts": lambda m, at: [*m[: at % len(m)], _huge(m[at % len(m)], at), *m[at % len(m) :]],
    "cut the header": lambda m, at: [*m[: at % len(m)], (m[at % len(m)][0][: at % 40], *m[at % len(m)][1:])],
    "cut the bytes": lambda m, at: [*m[: at % len(m)], (m[at % len(m)][0], *(f[: at % 999] for f in m[at % len(m)][1:]))],
    "more frames": lambda m, at: [*m[: at % len(m)], m[at % len(m)] + (b"more",) * (1 + at % 50), *m[at % len(m) :]],
    "over the limit": lambda m, at: [*m[: at % len(m)], (m[at % len(m)][0], bytes(2 * 2**20))],
    "noise": lambda m, at: [*m[: at % len(m)], (random.Random(at).randbytes(at % 400),), *m[at % len(m) :]],
    "spoil the bytes": lambda m, at: [(h, *(f[:-1] + bytes([f[-1] ^ 1]) if f else f for f in rest)) for h, *rest in m],
}


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(deeds=st.lists(st.tuples(st.sampled_from(sorted(DEEDS)), st.integers(0, 2**16)), min_size=1, max_size=2))
def test_whatever_a_peer_answers_the_acquire_ends_and_no_wrong_byte_is_granted(
    node: NodeProcess, client: PoolClient, deeds: list[tuple[str, int]]
):
    wanted = chain(2, first=random.Random(str(deeds)).randrange(10**6, 10**9))
    client.keepalive()
    with playing() as liar:
        client.acquire(wanted, wait=False, sources=[liar.source], timeout_s=1.0)
        pull = _next_pull(liar)
        script = wire(liar, pull)
        for name, at in deeds:
            script = DEEDS[name](script, at) or script
        for frames in script:
            liar.say_frames(*frames)
        heard = wait_for(client, AcquireEnded, within_s=4.0)
    for event in heard:
        if isinstance(event, AcquireEnded):
            assert event.miss in {None, Miss.LOST, Miss.LATE, Miss.CORRUPT, Miss.REFUSED, Miss.NOT_FOUND}
        elif isinstance(event, Granted):
            assert [bytes(block.buffer) for block in event.blocks] == [content(b.key, BLOCK_BYTES) for b in event.blocks]
            client.release([block.lease for block in event.blocks])
    healthy(node, client)


def _next_pull(liar: PlayedPeer) -> Pull:
    """Of the link that is there, or of a new one after the last was dropped."""
    while True:
        message = liar.hear(Request)  # type: ignore[arg-type]
        if isinstance(message, Hello):
            liar.say(liar.greeting)
        elif isinstance(message, Pull):
            return message


def test_a_flood_of_blocks_that_nobody_asked_for_costs_no_memory(node: NodeProcess, client: PoolClient, liar: PlayedPeer):
    """A quarter of a gigabyte in pieces, and ten thousand words without bytes, on a link that is in use."""
    client.keepalive()
    ticket = client.acquire([key(7)], wait=True, sources=[liar.source], timeout_s=20.0)
    pull = _next_pull(liar)
    before = peak = own_memory(node)
    for turn in range(500):
        for header, piece in messages(pull, key(8), BLOCK_BYTES, lease=turn):
            liar.say(replace(header, ticket=99), piece)
        for _ in range(20):
            liar.say(Stalled(pull.ticket))
        if turn % 50 == 49:
            assert liar.hear(Release)  # it is read, not piled up
            client.keepalive()
            client.poll(0.0)
            peak = max(peak, own_memory(node))
    client.cancel(ticket)
    liar.hear(Cancel)
    assert max(peak, own_memory(node)) - before < RSS_MARGIN_BYTES
    healthy(node, client)


# --- whoever reaches the port -----------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x00" + bytes(31)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
SHAKEN = GREETING + bytes([4, len(READY)]) + READY


def _long(flags: int, length: int) -> bytes:
    return bytes([flags | 2]) + length.to_bytes(8)


RAW = {
    "half a greeting": lambda noise: GREETING[: noise.randrange(64)],
    "noise": lambda noise: noise.randbytes(noise.randrange(1, 5000)),
    "noise after the greeting": lambda noise: GREETING + noise.randbytes(2000),
    "noise after the handshake": lambda noise: SHAKEN + noise.randbytes(2000),
    "a frame of a terabyte": lambda noise: SHAKEN + _long(0, 2**40) + bytes(1000),
    "a frame of 2^63": lambda noise: SHAKEN + _long(1, 2**63) + bytes(1000),
    "a command of a terabyte": lambda noise: GREETING + _long(4, 2**40) + bytes(1000),
    "a frame over the limit": lambda noise: SHAKEN + _long(0, 2 * 2**20) + bytes(2 * 2**20),
    "a message that stops": lambda noise: SHAKEN + _long(0, 2**20) + bytes(noise.randrange(2**19)),
    "many empty frames": lambda noise: SHAKEN + b"\x01\x00" * 5000 + b"\x00\x00",
    "a thousand subscriptions": lambda noise: SHAKEN + b"\x00\x02\x01a" * 1000,
}


def test_raw_bytes_at_its_ports_cost_a_node_neither_life_nor_memory(node: NodeProcess, client: PoolClient):
    noise = random.Random(SEED)
    before = own_memory(node)
    for turn in range(12):
        for endpoint in (node.endpoint, node.events_endpoint):
            host, port = endpoint.removeprefix("tcp://").split(":")
            for name in sorted(RAW):
                with socket.create_connection((host, int(port)), timeout=5) as raw, contextlib.suppress(OSError):
                    raw.sendall(RAW[name](noise))
        if turn % 4 == 0:
            healthy(node, client)
    healthy(node, client)
    assert own_memory(node) - before < RSS_MARGIN_BYTES, f"seed {SEED}"


def test_requests_that_lie_are_answered_with_an_error_or_not_at_all(
    node: NodeProcess, client: PoolClient, open_socket: OpenSocket
):
    """Of a peer that has said hello: replayed tickets, other incarnations, unknown leases and slots, writers from afar, values of
    all kinds."""
    noise = random.Random(SEED)
    before = own_memory(node)
    dealer = open_socket(zmq.DEALER)
    dealer.connect(node.endpoint)
    dealer.send(encode(Hello(), ""))
    pull = Pull(5, tuple(chain(64, first=9000)), False, 5.0, 8)
    for request, incarnation, code in [
        (pull, "another", ErrorCode.STALE_INCARNATION),
        (pull, node.incarnation, None),
        (pull, node.incarnation, ErrorCode.REPLAYED),
        (replace(pull, ticket=4), node.incarnation, ErrorCode.REPLAYED),
        (Abandon(3), node.incarnation, ErrorCode.NOT_RESERVED),
        (Commit(0, key(1), None, 16, 1, 1, b""), node.incarnation, ErrorCode.NOT_RESERVED),
        (Release((2**60,), True), node.incarnation, None),
        (Cancel(77), node.incarnation, None),
    ]:
        dealer.send(encode(request, incarnation))
        if code is not None:
            assert _answer(dealer, Refusal).code is code
    dealer.send(encode(Reserve(6, tuple(chain(2)), None, 1.0, False), node.incarnation))
    assert "machine" in _answer(dealer, ReserveDenied).reason
    for _ in range(2000):
        op, (_, table) = noise.choice(sorted(TABLE.items()))
        fields = {"op": op, "inc": node.incarnation} | {name: noise.choice(VALUES) for name in table}
        dealer.send(msgpack.packb(fields))
        dealer.send(b"\x82\xa2op\xa4pull\xa4keys\xdd\xff\xff\xff\xff")
    dealer.send(encode(Hello(), ""))  # one of the two thousand may have been a goodbye
    dealer.send(encode(Keepalive(), node.incarnation))
    assert _answer(dealer, Alive)
    assert own_memory(node) - before < RSS_MARGIN_BYTES, f"seed {SEED}"
    dealer.send(encode(Goodbye(), node.incarnation))
    until(lambda: node.stats()["clients"] == 1, clients=(client,))
    healthy(node, client)


def _answer(dealer: zmq.Socket[bytes], kind: type[T]) -> T:
    while True:
        assert dealer.poll(5000), f"no {kind.__name__}"
        frames = dealer.recv_multipart()
        with contextlib.suppress(MalformedMessageError):  # snapshots and batches are answers of another form
            answer, _ = decode(frames[0], ANSWERS)
            if isinstance(answer, kind):
                return answer


# --- a node that is replaced while it sleeps ---------------------------------------------------------------------------------


class Relay:
    """One address, behind which now one node stands and then another. Connections keep the node that they were made to."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                host, port = self.target.removeprefix("tcp://").split(":")
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_a_node_that_was_replaced_while_it_slept_is_refused_when_it_wakes(open_socket: OpenSocket):
    near = NodeProcess("node-a", slot_bytes=BLOCK_BYTES, client_dead_s=1.5)
    old = NodeProcess("node-b", slot_bytes=BLOCK_BYTES, client_dead_s=1.5)
    new = NodeProcess("node-b", slot_bytes=BLOCK_BYTES, client_dead_s=1.5)
    relay = Relay(old.endpoint)
    source = Source("node-b", relay.endpoint)
    reader, old_writer, new_writer = near.client("reader"), old.client("old"), new.client("new")
    try:
        put(old_writer, chain(2))
        put(new_writer, chain(2, first=100))
        assert get(reader, chain(1), source=source)[1].miss is None
        # It freezes in the middle of a pull that waits for more.
        reader.acquire(chain(3), wait=True, sources=[source], timeout_s=20.0)
        until(lambda: old.stats()["acquires_waiting"] == 1, clients=(reader, old_writer, new_writer))
        old.signal(signal.SIGSTOP)
        asleep_since = time.monotonic()
        relay.target = new.endpoint
        end = next(e for e in wait_for(reader, AcquireEnded) if isinstance(e, AcquireEnded))
        assert end.miss is Miss.LOST
        # Its successor at the same address serves; what only the old one had is not there.
        new_writer.keepalive()
        assert get(reader, chain(2, first=100), source=source)[1].miss is None
        assert get(reader, [key(900), key(901)], source=source)[1].miss is Miss.NOT_FOUND
        held = near.stats()["slots_committed"]
        until(lambda: time.monotonic() > asleep_since + 3.0, clients=(reader, new_writer))  # long enough to give everybody up
        old.signal(signal.SIGCONT)
        # It wakes: its worker is told to connect anew, its peer's words are refused, and nobody gets anything from it.
        until(lambda: old.stats()["clients_lost"] > 0, clients=(reader, new_writer))
        wait_for(old_writer, NodeLost)
        until(lambda: old.stats()["clients"] == 0, clients=(reader, new_writer))
        assert (old.stats()["leases"], old.stats()["acquires_waiting"]) == (0, 0)
        for stale, fresh in ((old, new), (new, old)):
            dealer = open_socket(zmq.DEALER)
            dealer.connect(fresh.endpoint)
            dealer.send(encode(Keepalive(), stale.incarnation))
            assert _answer(dealer, Refusal).code is ErrorCode.STALE_INCARNATION
        assert near.stats()["slots_committed"] == held
        assert get(reader, chain(1, first=100), source=source)[1].miss is None
        assert near.stats()["turns_failed"] == new.stats()["turns_failed"] == old.stats()["turns_failed"] == 0
    finally:
        relay.close()
        for one in (reader, old_writer, new_writer):
            one.close()
        for node in (near, old, new):
            node.close()
