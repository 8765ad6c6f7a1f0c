"""How fast the pool is, beside what the machine can do at best, measured in the same run. Each function returns plain figures."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash

from kv_pool.client import AcquireEnded, ClientEvent, Granted, NodeLost, PoolClient, Reserved
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings

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
    node_id: str
    endpoint: str


@contextmanager
def node_process(node_id: str, block_bytes: int = BLOCK_BYTES, slots: int = SLOTS) -> Iterator[Source]:
    """A pool node in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, node_id, block_bytes, slots), daemon=True)
    process.start()
    try:
        if not ours.poll(WAIT_S):
            raise RuntimeError("the pool node did not start")
        yield Source(node_id, ours.recv())
    finally:
        ours.close()
        process.join(WAIT_S)
        process.kill()


def _serve(pipe: Any, node_id: str, block_bytes: int, slots: int) -> None:
    settings = PoolSettings(dram=str(block_bytes * slots), client_dead_s=IDLE_S, lease_s=IDLE_S)
    node = PoolNode(node_id=node_id, slot_bytes=block_bytes, settings=settings)
    node.start()
    pipe.send(node.endpoint)
    try:
        pipe.recv()
    except EOFError:
        node.stop()


class Worker:
    """A client with blocking verbs. All that the benchmarks know of the client's interface is in here."""

    def __init__(self, source: Source, block_bytes: int = BLOCK_BYTES) -> None:
        self.client = PoolClient(source.endpoint, client_id="bench", block_bytes=block_bytes)
        self.client.connect(CONNECT_S)
        self.block_bytes = block_bytes

    def close(self) -> None:
        self.client.close()

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

    def keepalive(self) -> None:
        self.client.keepalive()

    def put(self, keys: list[BlockKey], data: memoryview | Sequence[memoryview]) -> None:
        """Store ``data`` (one piece per key, or the same for all) as a chain of its own."""
        self.client.reserve(keys, timeout_s=WAIT_S)
        parent = None
        for i, slot in enumerate(self.wait(Reserved)[-1].slots):
            slot.buffer[: self.block_bytes] = data if isinstance(data, memoryview) else data[i]
            self.client.commit(slot, tokens=64, parent=parent)
            parent = slot.key

    def get(
        self,
        keys: list[BlockKey],
        target: memoryview | Sequence[memoryview] | None,
        source: Source | None = None,
        *,
        checked: bool = True,
    ) -> None:
        """Acquire, copy out, check (``checked``: the bytes' checksum; else only that the lease held meanwhile), release."""
        self._acquire(keys, source)
        for event in self.wait(AcquireEnded):
            if isinstance(event, Granted):
                if target is not None:
                    block = event.block
                    into = target if isinstance(target, memoryview) else target[event.position]
                    into[:] = block.buffer
                    if not (block.verify() if checked else block.still_held()):
                        raise RuntimeError("a block is not what was stored")
                self._release([event.block.lease])
            else:
                _require_all(event, keys)

    def acquire_seconds(self, keys: list[BlockKey]) -> float:
        """From the order until all blocks are leased; they are released after that."""
        started = time.perf_counter()
        self._acquire(keys, None)
        events = self.wait(AcquireEnded)
        seconds = time.perf_counter() - started
        self._release([event.block.lease for event in events if isinstance(event, Granted)])
        _require_all(events[-1], keys)
        return seconds

    def _acquire(self, keys: list[BlockKey], source: Source | None) -> None:
        self.client.acquire(keys, wait=False, source=source, timeout_s=WAIT_S)

    def _release(self, leases: list[int]) -> None:
        for lease in leases:
            self.client.release(lease)


def _require_all(event: ClientEvent, keys: list[BlockKey]) -> None:
    if isinstance(event, AcquireEnded) and event.available != len(keys):
        raise RuntimeError(f"only {event.available} of {len(keys)}: {event.miss}")


def keys_of(series: int, count: int) -> list[BlockKey]:
    return [BlockKey(series.to_bytes(8) + i.to_bytes(8)) for i in range(count)]


def gigabytes_per_s(size: int, seconds: float) -> float:
    return size / seconds / 1e9


def local_copy(repeats: int = 5, blocks: int = 32) -> dict[str, float]:
    """GB/s of put and get between a worker and its node's arena, a plain memcpy of the same pieces, and the checksum alone."""
    data = memoryview(bytearray(b"\x5a" * BLOCK_BYTES))
    heap = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(blocks)]
    target = memoryview(bytearray(BLOCK_BYTES))
    figures: dict[str, list[float]] = {"put": [], "get": [], "memcpy": [], "checksum": [], "memcpy_and_checksum": []}
    with node_process("bench-local") as source:
        worker = Worker(source)
        for series in range(repeats + 1):  # the first one pays for first touches
            size = BLOCK_BYTES * blocks
            times = {}
            start = time.perf_counter()
            worker.put(keys_of(series, blocks), data)
            times["put"] = time.perf_counter() - start
            start = time.perf_counter()
            worker.get(keys_of(series, blocks), target)
            times["get"] = time.perf_counter() - start
            start = time.perf_counter()
            for piece in heap:
                target[:] = piece
            times["memcpy"] = time.perf_counter() - start
            start = time.perf_counter()
            for piece in heap:
                xxhash.xxh3_64_intdigest(piece)
            times["checksum"] = time.perf_counter() - start
            times["memcpy_and_checksum"] = times["memcpy"] + times["checksum"]
            if series:
                for name, seconds in times.items():
                    figures[name].append(gigabytes_per_s(size, seconds))
        worker.client.close()
    return {f"{name}_gb_s": statistics.median(values) for name, values in figures.items()}


def control_round_trip(repeats: int = 2000, chain: int = 32) -> dict[str, float]:
    """Microseconds of an acquire and release of one block that is there, and of a chain, without the copy."""
    with node_process("bench-control", block_bytes=4096, slots=256) as source:
        worker = Worker(source, 4096)
        keys = keys_of(1, chain)
        worker.put(keys, memoryview(bytes(4096)))
        one = _microseconds(lambda: worker.get(keys[:1], None), repeats)
        many = _microseconds(lambda: worker.get(keys, None), repeats // 4)
        worker.client.close()
    return {
        "acquire_1_us_p50": one[len(one) // 2],
        "acquire_1_us_p99": one[len(one) * 99 // 100],
        f"acquire_{chain}_us_p50": many[len(many) // 2],
        f"acquire_{chain}_us_p99": many[len(many) * 99 // 100],
    }


def _microseconds(call: Any, repeats: int) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def remote_pull(repeats: int = 5, blocks: int = 32) -> dict[str, float]:
    """GB/s of blocks from another node over loopback into the local arena, checked there (two node processes)."""
    data = memoryview(bytearray(b"\xa5" * BLOCK_BYTES))
    rates: list[float] = []
    with node_process("bench-far") as far, node_process("bench-near") as near:
        writer, reader = Worker(far), Worker(near)
        for series in range(repeats + 1):
            keys = keys_of(series, blocks)
            writer.put(keys, data)
            start = time.perf_counter()
            reader.get(keys, None, far)
            seconds = time.perf_counter() - start
            writer.keepalive()
            reader.keepalive()
            if series:
                rates.append(gigabytes_per_s(BLOCK_BYTES * blocks, seconds))
        writer.client.close()
        reader.client.close()
    return {"remote_gb_s": statistics.median(rates)}


if __name__ == "__main__":
    for measure in (local_copy, control_round_trip, remote_pull):
        print(measure.__name__, {name: round(value, 2) for name, value in measure().items()})
