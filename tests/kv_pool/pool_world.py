"""Parts for pool tests: a node state driven by hand, and real nodes in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from kv_pool.client import AcquireEnded, ClientEvent, Granted, LeasedBlock, PoolClient, Reserved, ReservedSlot, ReserveRefused
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings

SLOT_BYTES = 64 * 1024
CONNECT_S = 10.0


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16))


def content(k: BlockKey, length: int = SLOT_BYTES) -> bytes:
    """A block's bytes follow from its key, so that any reader can tell whether they are right."""
    return (k * (length // len(k) + 1))[:length]


@dataclass(frozen=True)
class Source:
    node_id: str
    endpoint: str


class NodeProcess:
    """A pool node in a process of its own, to be killed or frozen."""

    def __init__(self, node_id: str = "node-a", **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._pipe = ours
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, node_id, settings), daemon=True)
        self._process.start()
        theirs.close()
        assert ours.poll(60), "the node did not start"
        self.endpoint, self.events_endpoint, self.incarnation = ours.recv()
        self.node_id = node_id
        self.source = Source(node_id, self.endpoint)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def stats(self) -> dict[str, Any]:
        self._pipe.send("stats")
        assert self._pipe.poll(10), "the node does not answer"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def client(self, name: str = "worker") -> PoolClient:
        client = PoolClient(self.endpoint, client_id=name, block_bytes=SLOT_BYTES)
        client.connect(CONNECT_S)
        return client

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()


def _serve(pipe: Any, node_id: str, settings: dict[str, Any]) -> None:
    node = PoolNode(node_id=node_id, slot_bytes=SLOT_BYTES, settings=PoolSettings(**settings), block_tokens=16)
    node.start()
    pipe.send((node.endpoint, node.events_endpoint, node.incarnation))
    while True:
        try:
            pipe.recv()
        except EOFError:
            node.stop()
            return
        pipe.send(node.stats())


def wait_for(client: PoolClient, *kinds: type, within_s: float = 10.0) -> list[ClientEvent]:
    """Poll until an event of ``kinds`` came; returns all events up to it."""
    events: list[ClientEvent] = []
    deadline = time.monotonic() + within_s
    while not any(isinstance(event, kinds) for event in events):
        assert time.monotonic() < deadline, f"no {kinds} in {within_s} s, only {events}"
        events += client.poll(0.05)
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
            slot.buffer[:] = content(slot.key)
            client.commit(slot, tokens=16, parent=parent, meta=meta)
        parent = slot.key if slot is not None else parent


def get(
    client: PoolClient, keys: list[BlockKey], *, wait: bool = False, source: Source | None = None, timeout_s: float = 5.0
) -> tuple[list[LeasedBlock], AcquireEnded]:
    client.acquire(keys, wait=wait, source=source, timeout_s=timeout_s)
    events = wait_for(client, AcquireEnded, within_s=timeout_s + 5)
    ended = events[-1]
    assert isinstance(ended, AcquireEnded)
    return [event.block for event in events if isinstance(event, Granted)], ended
