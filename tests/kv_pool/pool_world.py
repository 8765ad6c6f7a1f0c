"""Parts for tests with real nodes: each in a process of its own, to be killed or frozen; and workers that talk to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from kv_pool.client import (
    AcquireEnded,
    ClientEvent,
    Granted,
    LeasedBlock,
    NodeLost,
    PoolClient,
    Reserved,
    ReservedSlot,
    ReserveRefused,
)
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings, SsdSettings

SLOT_BYTES = 64 * 1024
BLOCK_TOKENS = 16
CONNECT_S = 10.0
SPAWN = multiprocessing.get_context("spawn")


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16))


def chain(count: int, first: int = 1) -> list[BlockKey]:
    return [key(first + i) for i in range(count)]


def content(k: BlockKey, length: int = SLOT_BYTES) -> bytes:
    """A block's bytes follow from its key, so that any reader can tell whether they are right."""
    return (k * (length // len(k) + 1))[:length]


@dataclass(frozen=True)
class Source:
    node_id: str
    endpoint: str


class Child:
    """A process that answers over a pipe until it is killed."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process: BaseProcess = SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, within_s: float = 30.0) -> Any:
        assert self.pipe.poll(within_s), "the process does not answer"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self.pipe.close()


class NodeProcess(Child):
    """A pool node in a process of its own."""

    def __init__(
        self, node_id: str = "node-a", *, slot_bytes: int = SLOT_BYTES, ssd: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        settings = {"client_dead_s": 5.0, "dram": str(16 * slot_bytes)} | settings
        super().__init__(_serve, node_id, slot_bytes, settings, ssd or {})
        self.endpoint, self.local_endpoint, self.events_endpoint, self.incarnation = self.hear()
        self.slot_bytes = slot_bytes
        self.clients: list[PoolClient] = []
        self.closed = False
        self.source = Source(node_id, self.endpoint)

    def stats(self) -> dict[str, Any]:
        self.pipe.send("stats")
        return self.hear()

    def status(self) -> dict[str, Any]:
        self.pipe.send("status")
        return self.hear()

    def drain(self, *, enable: bool) -> None:
        self.pipe.send("drain" if enable else "undrain")
        self.hear()

    def client(self, name: str = "worker") -> PoolClient:
        """Closed with the node, if not before."""
        self.clients.append(connect(self.local_endpoint, name, self.slot_bytes))
        return self.clients[-1]

    def close(self) -> None:
        """Safe to call twice."""
        for client in self.clients:
            client.close()
        if not self.closed:
            self.closed = True
            super().close()


def connect(endpoint: str, name: str = "worker", block_bytes: int = SLOT_BYTES, timeout_s: float = CONNECT_S) -> PoolClient:
    client = PoolClient(endpoint, client_id=name, block_bytes=block_bytes)
    client.connect(timeout_s)
    return client


def _serve(pipe: Any, node_id: str, slot_bytes: int, settings: dict[str, Any], ssd: dict[str, Any]) -> None:
    node = PoolNode(
        node_id=node_id,
        slot_bytes=slot_bytes,
        settings=PoolSettings(**settings),
        ssd=SsdSettings(**ssd),
        block_tokens=BLOCK_TOKENS,
    )
    node.start()
    pipe.send((node.endpoint, node.local_endpoint, node.events_endpoint, node.incarnation))
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            node.stop()
            return
        if order in ("drain", "undrain"):
            node.drain(enable=order == "drain")
        pipe.send(node.status() if order == "status" else node.stats())


def wait_for(client: PoolClient, *kinds: type, within_s: float = 10.0) -> list[ClientEvent]:
    """Poll until an event of ``kinds`` came; returns all events up to it."""
    events: list[ClientEvent] = []
    deadline = time.monotonic() + within_s
    while not any(isinstance(event, kinds) for event in events):
        assert time.monotonic() < deadline, f"no {kinds} in {within_s} s, only {events}"
        events += client.poll(0.05)
        lost = [event for event in events if isinstance(event, NodeLost)]
        assert not lost or NodeLost in kinds, f"the node was lost meanwhile: {lost[0].reason}"
        client.keepalive()
    return events


def until(condition: Callable[[], Any], *, within_s: float = 10.0, clients: tuple[PoolClient, ...] = ()) -> None:
    """Poll ``condition``, keeping ``clients`` alive meanwhile."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        for client in clients:
            client.keepalive()
            client.poll(0.0)
        time.sleep(0.02)


def reserve(
    client: PoolClient, keys: list[BlockKey], *, private: bool = False, timeout_s: float = 5.0
) -> tuple[ReservedSlot | None, ...]:
    client.reserve(keys, timeout_s=timeout_s, private=private)
    last = wait_for(client, Reserved, ReserveRefused)[-1]
    assert isinstance(last, Reserved), last
    return last.slots


def put(
    client: PoolClient, keys: list[BlockKey], parent: BlockKey | None = None, *, private: bool = False, meta: bytes = b""
) -> None:
    """Write a chain of blocks whose bytes follow from their keys."""
    for slot in reserve(client, keys, private=private):
        if slot is not None:
            slot.buffer[:] = content(slot.key, len(slot.buffer))
            client.commit(slot, tokens=BLOCK_TOKENS, parent=parent, meta=meta)
        parent = slot.key if slot is not None else parent


def get(
    client: PoolClient, keys: list[BlockKey], *, wait: bool = False, source: Source | None = None, timeout_s: float = 5.0
) -> tuple[list[LeasedBlock], AcquireEnded]:
    client.acquire(keys, wait=wait, sources=() if source is None else (source,), timeout_s=timeout_s)
    events = wait_for(client, AcquireEnded, within_s=timeout_s + 5)
    ended = events[-1]
    assert isinstance(ended, AcquireEnded)
    return [block for event in events if isinstance(event, Granted) for block in event.blocks], ended
