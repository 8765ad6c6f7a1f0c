"""A node in a process of its own, and a worker beside it with verbs that wait: what the benchmarks of the pool are made of."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kv_pool.client import AcquireEnded, ClientEvent, Granted, LeasedBlock, NodeLost, PoolClient, Reserved, copy_and_digest
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings, SsdSettings

MIB = 2**20
BLOCK_BYTES = 3 * MIB
"""About what one block of 64 tokens is in a model of 1 to 3 billion parameters."""
SLOTS = 96
CONNECT_S = 10.0
WAIT_S = 20.0
IDLE_S = 600.0
"""Long: a worker that waits for its turn beside a peer sends no keepalive."""


@dataclass(frozen=True)
class Source:
    """A node: ``endpoint`` is for other nodes, ``local_endpoint`` for workers of its machine. ``pid`` and ``status`` (what
    :meth:`PoolNode.status` says) are for who started it."""

    node_id: str
    endpoint: str
    local_endpoint: str
    pid: int = 0
    pipe: Any = field(default=None, repr=False, compare=False)

    def status(self) -> dict[str, Any]:
        self.pipe.send("status")
        if not self.pipe.poll(WAIT_S):
            raise RuntimeError("the pool node does not answer")
        return self.pipe.recv()


@contextmanager
def node_process(
    node_id: str,
    block_bytes: int = BLOCK_BYTES,
    slots: int = SLOTS,
    ssd: SsdSettings | None = None,
    settings: PoolSettings | None = None,
) -> Iterator[Source]:
    """A pool node in a process of its own. Its clients may be silent for long, unless ``settings`` say otherwise."""
    settings = settings or PoolSettings(dram=str(block_bytes * slots), client_dead_s=IDLE_S, lease_s=IDLE_S)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, node_id, block_bytes, settings, ssd), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAIT_S):
            raise RuntimeError("the pool node did not start")
        yield Source(node_id, *ours.recv(), pid=process.pid or 0, pipe=ours)
    finally:
        ours.close()
        process.join(WAIT_S)
        process.kill()


def _serve(pipe: Any, node_id: str, block_bytes: int, settings: PoolSettings, ssd: SsdSettings | None) -> None:
    node = PoolNode(node_id=node_id, slot_bytes=block_bytes, settings=settings, ssd=ssd)
    node.start()
    pipe.send((node.endpoint, node.local_endpoint))
    try:
        while pipe.recv():
            pipe.send(node.status())
    except EOFError:
        node.stop()


class Worker:
    """A client with blocking verbs. All that the benchmarks know of the client's interface is in here."""

    def __init__(self, source: Source, block_bytes: int = BLOCK_BYTES) -> None:
        self.client = PoolClient(source.local_endpoint, client_id="bench", block_bytes=block_bytes)
        self.client.connect(CONNECT_S)
        self.block_bytes = block_bytes

    def close(self) -> None:
        self.client.close()

    def keepalive(self) -> None:
        self.client.keepalive()

    def wait_until_prefaulted(self, timeout_s: float) -> None:
        """All pages of the arena are mapped here, so that no first touch is measured. (The node maps its own.)"""
        deadline = time.monotonic() + timeout_s
        while self.client._arena is not None and self.client._arena.prefaulting:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the arena was not mapped in {timeout_s:g} s")
            time.sleep(0.05)
            self.keepalive()

    def wait(self, kind: type, count: int = 1) -> list[Any]:
        found: list[ClientEvent] = []
        deadline = time.monotonic() + WAIT_S
        while sum(isinstance(event, kind) for event in found) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {kind.__name__} in {WAIT_S:g} s, but {[type(event).__name__ for event in found[:8]]}")
            found += self.client.poll(0.5)
            if found and isinstance(found[-1], NodeLost):
                raise RuntimeError(f"the node is lost: {found[-1].reason}")
        return found

    def put(
        self,
        keys: list[BlockKey],
        data: memoryview | Sequence[memoryview],
        checksums: Sequence[int] | None = None,
        retention: str = "",
    ) -> None:
        """Store ``data`` (one piece per key, or the same for all) as a chain of its own. Its checksum is made while it is copied;
        with ``checksums`` they are taken as known, and it is only copied."""
        self.client.reserve(keys, timeout_s=WAIT_S, retention=retention)
        answer = self.wait(Reserved)[-1]
        parent = None
        for i, slot in enumerate(answer.slots):
            piece = data if isinstance(data, memoryview) else data[i]
            if checksums is None:
                checksum = copy_and_digest(piece, slot.buffer)
            else:
                slot.buffer[: self.block_bytes] = piece
                checksum = checksums[i]
            self.client.commit(slot, tokens=64, parent=parent, checksum=checksum)
            parent = slot.key

    def get(
        self,
        keys: list[BlockKey],
        target: memoryview | Sequence[memoryview] | None,
        source: Source | None = None,
        *,
        checked: bool = True,
    ) -> None:
        """Acquire, copy out, check (``checked``: the bytes' checksum; else only that the lease held meanwhile), release. Raises
        RuntimeError where not all of it can be had."""
        self._acquire(keys, source)
        leases: list[int] = []
        for event in self.wait(AcquireEnded):
            if isinstance(event, Granted):
                for position, block in enumerate(event.blocks, event.position):
                    leases.append(block.lease)
                    if target is not None:
                        _copy(block, target if isinstance(target, memoryview) else target[position], checked=checked)
            else:
                _require_all(event, keys)
        self.client.release(leases)

    def acquire_seconds(self, keys: list[BlockKey]) -> float:
        """From the order until all blocks are leased; they are released after that."""
        started = time.perf_counter()
        self._acquire(keys, None)
        events = self.wait(AcquireEnded)
        seconds = time.perf_counter() - started
        self.client.release(block.lease for event in events if isinstance(event, Granted) for block in event.blocks)
        _require_all(events[-1], keys)
        return seconds

    def has(self, key: BlockKey) -> bool:
        """Whether the node can lease the block now."""
        self._acquire([key], None)
        events = self.wait(AcquireEnded)
        self.client.release(block.lease for event in events if isinstance(event, Granted) for block in event.blocks)
        return events[-1].available == 1

    def _acquire(self, keys: list[BlockKey], source: Source | None) -> None:
        self.client.acquire(keys, wait=False, sources=() if source is None else (source,), timeout_s=WAIT_S)


def _copy(block: LeasedBlock, target: memoryview, *, checked: bool) -> None:
    if checked:
        sound = block.copy_to(target)
    else:
        target[:] = block.buffer
        sound = block.still_held()
    if not sound:
        raise RuntimeError("a block is not what was stored")


def _require_all(event: ClientEvent, keys: list[BlockKey]) -> None:
    if isinstance(event, AcquireEnded) and event.available != len(keys):
        raise RuntimeError(f"only {event.available} of {len(keys)}: {event.miss}")


def keys_of(series: int, count: int) -> list[BlockKey]:
    return [BlockKey(series.to_bytes(8) + i.to_bytes(8)) for i in range(count)]


def gigabytes_per_s(size: int, seconds: float) -> float:
    return size / seconds / 1e9
