"""Runs inside Mooncake Store's own environment, asked line by line. ``lines.py`` beside it is the only file of ours it imports.

``python mooncake_store.py shared_memory|tcp SEGMENT_BYTES BLOCK_BYTES_MAX``

It starts ``mooncake_master`` and the process that owns the memory (``mooncake_client`` for the shared-memory client, this script
once more for TCP), all on 127.0.0.1, and is itself the client. Buffers are registered and touched before anything is timed, and
so is the whole segment: it is filled once and emptied.

``{"do": "put", "block": b, "blocks": n, "batch": k}`` -> ``{"seconds": s}``: ``n`` blocks of ``b`` bytes under new keys, ``k`` a
call (1 is put_from, more is batch_put_from). ``{"do": "get", ...}`` -> ``{"seconds": s}``: reads what the last put wrote; what is
in the buffers then is compared after the clock has stopped. ``{"do": "is_exist", "times": n}`` -> ``{"microseconds": [...]}``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
PORTS = range(21000, 29000)
START_S = 30.0
RING = 16
"""Blocks in the client's buffer, which is as long as a batch."""
PATTERN_BYTES = 1 << 16
PACKAGE = "mooncake-transfer-engine-non-cuda"
MOST_OF = 0.85
"""Of a segment; from 0.9 on Mooncake evicts."""

ENVIRONMENT = {
    "MC_LOG_LEVEL": "WARNING",
    "MC_TCP_BIND_ADDRESS": HOST,
    # Its own choice would be between 12,300 and 15,000.
    "MC_MIN_PRC_PORT": "26000",
    "MC_MAX_PRC_PORT": "27999",
    "MC_MIN_RPC_PORT": "26000",
    "MC_MAX_RPC_PORT": "27999",
    "MC_STORE_CLIENT_MIN_PORT": "28000",
    "MC_STORE_CLIENT_MAX_PORT": "28999",
    # The fastest of what was tried: connections 1, 4, 16; slices of 64 KiB .. 4 MiB; no pool of connections.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
}
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def leave_the_network() -> None:
    """Into a network of our own that has a loopback device and nothing else: some of Mooncake's sockets listen on every address.
    Where that is not allowed it stays in the machine's network, on 127.0.0.1 as far as it can be told to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        print("no private network:", os.strerror(ctypes.get_errno()), file=sys.stderr)
        return
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} ended with status {process.returncode}")  # type: ignore[index]
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args[0]} did not listen in {START_S:g} s")  # type: ignore[index]


def start(*command: str) -> subprocess.Popen[bytes]:
    """Ends with our process group, which whoever started us ends."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)


def start_master(binaries: Path) -> int:
    port, metrics = free_port(), 0
    with socket.socket() as held:
        held.bind((HOST, port))
        metrics = free_port()
    master = start(
        str(binaries / "mooncake_master"), f"--rpc_port={port}", f"--rpc_address={HOST}", f"--metrics_port={metrics}",
        f"--metrics_host={HOST}", "--enable_metric_reporting=false", "--rpc_thread_num=2",
    )  # fmt: skip
    wait_for_port(port, master)
    return port


def checked(codes: list[int], wanted: int, what: str) -> None:
    if any(code != wanted for code in codes):
        raise RuntimeError(f"{what} returned {codes[:16]} where {wanted} was due")


class Client:
    """``address`` and ``length`` are of memory that is registered with ``store``."""

    def __init__(self, store: Any, address: int, block_max: int) -> None:
        self._store = store
        self._address = address
        self._bytes = (ctypes.c_char * (RING * block_max)).from_address(address)
        self._series = 0
        self._keys: list[str] = []
        ctypes.memset(address, 1, RING * block_max)

    def warm_up(self, segment: int, block: int) -> None:
        """Touch the whole segment."""
        self._put(block, int(MOST_OF * segment) // block, RING)
        self._forget()

    def handle(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "is_exist":
            return {"microseconds": [self._is_exist() for _ in range(question["times"])]}
        block, blocks, batch = question["block"], question["blocks"], question["batch"]
        if question["do"] == "put":
            self._forget()
            return {"seconds": self._put(block, blocks, batch)}
        return {"seconds": self._get(block, blocks, batch)}

    def _put(self, block: int, blocks: int, batch: int) -> float:
        self._series += 1
        self._keys = [f"{self._series}-{i}" for i in range(blocks)]
        for i in range(RING):
            self._fill(i, block, self._series)

        def call(keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
            if batch == 1:
                return [self._store.put_from(keys[0], addresses[0], block)]
            return self._store.batch_put_from(keys, addresses, sizes)

        return self._timed(block, batch, call, 0, "put")

    def _get(self, block: int, blocks: int, batch: int) -> float:
        if len(self._keys) != blocks:
            raise RuntimeError("put first")
        ctypes.memset(self._address, 0, RING * block)

        def call(keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
            if batch == 1:
                return [self._store.get_into(keys[0], addresses[0], block)]
            return self._store.batch_get_into(keys, addresses, sizes)

        seconds = self._timed(block, batch, call, block, "get")
        for i in range(min(RING, blocks)):
            self._check(i, block, self._series)
        return seconds

    def _timed(self, block: int, batch: int, call: Callable[..., list[int]], wanted: int, what: str) -> float:
        places = [self._address + i * block for i in range(RING)]
        sizes = [block] * batch
        calls = []
        for first in range(0, len(self._keys), batch):
            keys = self._keys[first : first + batch]
            at = first % RING
            calls.append((keys, places[at : at + len(keys)], sizes[: len(keys)]))
        codes: list[list[int]] = []
        started = time.perf_counter()
        for keys, addresses, lengths in calls:
            codes.append(call(keys, addresses, lengths))
        seconds = time.perf_counter() - started
        for answered in codes:
            checked(answered, wanted, what)
        return seconds

    def _is_exist(self) -> float:
        started = time.perf_counter()
        code = self._store.is_exist(self._keys[0])
        seconds = time.perf_counter() - started
        checked([code], 1, "is_exist")
        return 1e6 * seconds

    def _forget(self) -> None:
        if self._keys:
            checked(self._store.batch_remove(self._keys, True), 0, "remove")
            self._keys = []

    def _pattern(self, place: int, series: int) -> bytes:
        return (b"%08d%08d" % (series, place)) * (PATTERN_BYTES // 16)

    def _fill(self, place: int, block: int, series: int) -> None:
        pattern = self._pattern(place, series)
        for at in range(place * block, (place + 1) * block, PATTERN_BYTES):
            ctypes.memmove(self._address + at, pattern, PATTERN_BYTES)

    def _check(self, place: int, block: int, series: int) -> None:
        pattern = self._pattern(place, series)
        for at in range(place * block, (place + 1) * block, PATTERN_BYTES):
            if self._bytes[at : at + PATTERN_BYTES] != pattern:
                raise RuntimeError("the store returned other bytes than were put")


def shared_memory(segment: int, block_max: int) -> Client:
    """Its client for processes beside the one that owns the memory: buffers are shared with the owner, which copies."""
    from mooncake.store import MooncakeDistributedStore

    binaries = Path(sys.executable).parent
    master = start_master(binaries)
    port = free_port()
    owner = start(
        str(binaries / "mooncake_client"), f"--host={HOST}", f"--port={port}", "--metadata_server=P2PHANDSHAKE",
        f"--master_server_address={HOST}:{master}", "--protocol=tcp", f"--global_segment_size={segment}", "--threads=2",
    )  # fmt: skip
    wait_for_port(port, owner)
    store = MooncakeDistributedStore()
    checked([store.setup_dummy(2 * RING * block_max, RING * block_max, f"{HOST}:{port}")], 0, "setup_dummy")
    address = store.alloc_from_mem_pool(RING * block_max)
    if not address:
        raise RuntimeError("no buffer from the memory pool")
    checked([store.register_buffer(address, RING * block_max)], 0, "register_buffer")
    return Client(store, address, block_max)


def tcp(segment: int, block_max: int) -> Client:
    """Client and segment in two processes that speak TCP."""
    from mooncake.store import MooncakeDistributedStore

    master = start_master(Path(sys.executable).parent)
    owner = subprocess.Popen(
        [sys.executable, __file__, "segment", str(segment), str(master)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    if owner.stdout.readline().strip() != b"ready":
        raise RuntimeError("the process that owns the segment did not start")
    store = MooncakeDistributedStore()
    checked([_setup(store, 0, master)], 0, "setup")
    memory = ctypes.create_string_buffer(RING * block_max + 4096)
    address = (ctypes.addressof(memory) + 4095) // 4096 * 4096
    checked([store.register_buffer(address, RING * block_max)], 0, "register_buffer")
    client = Client(store, address, block_max)
    client.memory = memory  # type: ignore[attr-defined]  # lives as long as the client
    return client


def _setup(store: Any, segment: int, master: int) -> int:
    return store.setup(HOST, "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", f"{HOST}:{master}")


def own_segment(segment: int, master: int) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    checked([_setup(store, segment, master)], 0, "setup")
    print("ready", file=out, flush=True)
    while True:
        time.sleep(3600)  # whoever started us ends our process group


def main() -> None:
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    role, segment = sys.argv[1], int(sys.argv[2])
    if role == "segment":
        own_segment(segment, int(sys.argv[3]))
    from lines import answers_to_own_stdout, serve

    answer = answers_to_own_stdout()
    leave_the_network()
    block_max = int(sys.argv[3])
    client = {"shared_memory": shared_memory, "tcp": tcp}[role](segment, block_max)
    client.warm_up(segment, block_max)
    serve(answer, client.handle, version=metadata.version(PACKAGE))


if __name__ == "__main__":
    main()
