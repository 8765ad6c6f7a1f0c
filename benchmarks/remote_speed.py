"""How fast blocks come from another node over loopback, beside what plain sockets move in the same run. Plain figures in GB/s.

``pool``: two node processes; from ``acquire`` until all blocks are granted, so they are in the near arena and checked there.
``raw`` and ``raw_checked``: ``sendall`` out of one shared-memory arena, ``recv_into`` another one; without and with the checksum.
``zmq_whole``: each block as one zmq message, copied into the arena and checked there.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import xxhash
import zmq

from benchmarks.harness import interleaved
from benchmarks.pool_speed import MIB, Worker, gigabytes_per_s, keys_of, node_process
from kv_pool.arena import Arena

BLOCKS: Final = {1 * MIB: 96, 4 * MIB: 32, 16 * MIB: 12}
"""Block size -> length of the chain: many times what is on the way at once."""
WAIT_S: Final = 20.0
SOCKET_PIECE: Final = 512 * 1024
"""Bytes that one ``recv_into`` asks for: what still is in the cache when it is hashed."""


def remote_speed(block_bytes: int, repeats: int = 5) -> dict[str, float]:
    """Medians of ``repeats`` interleaved rounds, after one that pays for first touches."""
    blocks = BLOCKS[block_bytes]
    with ExitStack() as stack:
        measures = {
            "pool": stack.enter_context(pool_rate(block_bytes, blocks)),
            "raw": stack.enter_context(raw_rate(block_bytes, blocks, checked=False)),
            "raw_checked": stack.enter_context(raw_rate(block_bytes, blocks, checked=True)),
            "zmq_whole": stack.enter_context(zmq_whole_rate(block_bytes, blocks)),
        }
        for measure in measures.values():
            measure()
        rounds = interleaved(repeats, *measures.values())
    return {name: statistics.median(values) for name, values in zip(measures, rounds, strict=True)}


@contextmanager
def pool_rate(block_bytes: int, blocks: int) -> Iterator[Callable[[], float]]:
    data = memoryview(bytearray(b"\xa5" * block_bytes))
    series = 0
    with (
        node_process("bench-far", block_bytes, 2 * blocks + 4) as far,
        node_process("bench-near", block_bytes, 2 * blocks + 4) as near,
    ):
        writer, reader = Worker(far, block_bytes), Worker(near, block_bytes)

        def measure() -> float:
            nonlocal series
            series += 1
            keys = keys_of(series, blocks)
            writer.put(keys, data)
            writer.get(keys[-1:], None)  # the commits are through
            start = time.perf_counter()
            reader.get(keys, None, far)
            seconds = time.perf_counter() - start
            writer.client.keepalive()
            reader.client.keepalive()
            return gigabytes_per_s(block_bytes * blocks, seconds)

        yield measure
        writer.client.close()
        reader.client.close()


@contextmanager
def raw_rate(block_bytes: int, blocks: int, *, checked: bool) -> Iterator[Callable[[], float]]:
    with _child(_send_raw, block_bytes, blocks) as port, socket.create_connection(("127.0.0.1", port)) as sock:
        arena = _warm_arena(block_bytes, blocks)

        def measure() -> float:
            start = time.perf_counter()
            sock.sendall(b"?")
            for i in range(blocks):
                _receive(sock, arena.slot(i), checked=checked)
            return gigabytes_per_s(block_bytes * blocks, time.perf_counter() - start)

        yield measure
        arena.close()


def _receive(sock: socket.socket, slot: memoryview, *, checked: bool) -> int:
    digest = xxhash.xxh3_64()
    filled = 0
    while filled < len(slot):
        end = min(len(slot), filled + SOCKET_PIECE)
        size = sock.recv_into(slot[filled:end], flags=socket.MSG_WAITALL)
        if not size:
            raise RuntimeError("the sender is gone")
        if checked:
            digest.update(slot[filled : filled + size])
        filled += size
    return digest.intdigest()


def _send_raw(pipe: Any, block_bytes: int, blocks: int) -> None:
    arena = _warm_arena(block_bytes, blocks)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        sock, _ = server.accept()
        with sock:
            while sock.recv(1):
                for i in range(blocks):
                    sock.sendall(arena.slot_read_only(i))


@contextmanager
def zmq_whole_rate(block_bytes: int, blocks: int) -> Iterator[Callable[[], float]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with _child(_send_zmq, block_bytes, blocks) as port:
        sock = context.socket(zmq.DEALER)
        sock.connect(f"tcp://127.0.0.1:{port}")
        arena = _warm_arena(block_bytes, blocks)

        def measure() -> float:
            start = time.perf_counter()
            sock.send(b"?")
            for i in range(blocks):
                slot = arena.slot(i)
                slot[:] = sock.recv(copy=False).buffer
                xxhash.xxh3_64_intdigest(slot)
            return gigabytes_per_s(block_bytes * blocks, time.perf_counter() - start)

        yield measure
        sock.close(0)
        arena.close()
    context.term()


def _send_zmq(pipe: Any, block_bytes: int, blocks: int) -> None:
    arena = _warm_arena(block_bytes, blocks)
    sock = zmq.Context().socket(zmq.ROUTER)
    pipe.send(sock.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        name, _ = sock.recv_multipart()
        for i in range(blocks):
            sock.send_multipart([name, arena.slot_read_only(i)], copy=False)


@contextmanager
def _child(target: Callable[..., None], *args: Any) -> Iterator[int]:
    """A process that tells its port, and lives as long as the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        if not ours.poll(WAIT_S):
            raise RuntimeError("the sender did not start")
        yield ours.recv()
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()


def _warm_arena(slot_bytes: int, slots: int) -> Arena:
    arena = Arena.create(slots, slot_bytes)
    for i in range(slots):
        arena.slot(i)[:] = bytes(slot_bytes)
    return arena


if __name__ == "__main__":
    for size in BLOCKS:
        print(f"{size // MIB} MiB", {name: round(value, 2) for name, value in remote_speed(size).items()})
