"""A node under mixed load for minutes: does it stay what it was? ``python -m benchmarks.soak --minutes 10``

Workers in processes of their own read documents and write what is missing of them, three times as much as DRAM holds; one of them
is killed every now and then in the middle of it. Every block that is read is compared with what its key says. In the end

- the node's own memory has not grown since the warm-up,
- nothing is leased, reserved or on its way, and every slot is free or holds a block,
- what the tier says it has written is what its directory got, as the kernel counts it, and the files take what they should.

Exit status 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from benchmarks.pool_speed import Source, Worker, node_process
from kv_pool.client import AcquireEnded, Granted, NodeLost, Reserved, ReserveRefused
from kv_pool.keys import BlockKey
from kv_pool.settings import PoolSettings, SsdSettings

MIB: Final = 2**20
BLOCK_BYTES: Final = 256 * 1024
TOKENS: Final = 64
CHAIN_MAX: Final = 16
WORKERS: Final = 2
CAPACITIES: Final = 3
"""The documents take so many times what DRAM holds."""
SSD_CAPACITIES: Final = 2
SEGMENT_BYTES: Final = 16 * MIB
RETENTIONS: Final = ("chat", "agent", "coding", "batch")
WAIT_S: Final = 10.0
"""Deadline of an acquire and of a reservation."""
GIVE_UP_S: Final = 2 * WAIT_S
KILL_PERIOD_S: Final = 15.0
SAMPLE_S: Final = 2.0
WARM_UP: Final = 0.25
"""Share of the time after which memory is looked at."""
GROWTH_MAX_BYTES: Final = 8 * MIB
GROWTH_MAX_SHARE: Final = 0.05
QUIET_S: Final = 30.0
WRITTEN_SLACK: Final = 0.002
"""Share of the bytes written that the kernel may count beyond the tier: the saved budget, the directory's own files."""
ABANDONED: Final = 0.05
CANCELLED: Final = 0.05


def document(number: int) -> list[BlockKey]:
    """Documents have 1 to ``CHAIN_MAX`` blocks."""
    length = random.Random(number).randint(1, CHAIN_MAX)
    return [BlockKey(hashlib.blake2b(b"%d:%d" % (number, i), digest_size=16).digest()) for i in range(length)]


def content(key: BlockKey) -> bytes:
    return key * (BLOCK_BYTES // len(key))


class Reader:
    """One worker: reads a document as far as the pool has it, and writes the rest."""

    def __init__(self, source: Source, seed: int, documents: int) -> None:
        self._worker = Worker(source, BLOCK_BYTES)
        self._client = self._worker.client
        self._draw = random.Random(seed)
        self._documents = documents
        self._copy = memoryview(bytearray(BLOCK_BYTES))
        self._cancelled: set[int] = set()
        self.counts: Counter[str] = Counter()

    def once(self) -> None:
        # Half of the requests go to a tenth of the documents.
        hot = self._draw.random() < 0.5
        number = self._draw.randrange(max(1, self._documents // 10) if hot else self._documents)
        keys = document(number)
        ticket = self._client.acquire(keys, wait=False, timeout_s=WAIT_S)
        if self._draw.random() < CANCELLED:
            self._cancel(ticket)
            return
        available = self._read(ticket)
        if available < len(keys):
            self._write(keys, available, RETENTIONS[number % len(RETENTIONS)])

    def keepalive(self) -> None:
        self._client.keepalive()

    def close(self) -> None:
        self._worker.close()

    def _cancel(self, ticket: int) -> None:
        """Nothing more is said of the acquire then; what was granted before is given back when it comes."""
        self._client.cancel(ticket)
        self._cancelled.add(ticket)
        self.counts["cancelled"] += 1

    def _read(self, ticket: int) -> int:
        """How many of its keys an acquire got."""
        leases: list[int] = []
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            for event in self._events():
                if isinstance(event, Granted) and event.ticket == ticket:
                    for block in event.blocks:
                        leases.append(block.lease)
                        if not block.copy_to(self._copy):
                            raise RuntimeError("a leased block changed")
                        if self._copy != content(block.key):
                            raise RuntimeError("a block holds other bytes than were written")
                        self.counts[f"read_{block.tier.name.lower()}"] += 1
                elif isinstance(event, AcquireEnded) and event.ticket == ticket:
                    self._client.release(leases)
                    if event.miss is not None:
                        self.counts[f"miss_{event.miss}"] += 1
                    return event.available
        raise RuntimeError(f"an acquire did not end in {GIVE_UP_S:g} s")

    def _write(self, keys: list[BlockKey], available: int, retention: str) -> None:
        parent = keys[available - 1] if available else None
        ticket = self._client.reserve(keys[available:], timeout_s=WAIT_S, parent=parent, retention=retention)
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            for event in self._events():
                if isinstance(event, ReserveRefused) and event.ticket == ticket:
                    self.counts["write_refused"] += 1
                    return
                if isinstance(event, Reserved) and event.ticket == ticket:
                    self._fill(keys, available, event)
                    return
        raise RuntimeError(f"a reservation was not answered in {GIVE_UP_S:g} s")

    def _fill(self, keys: list[BlockKey], available: int, reserved: Reserved) -> None:
        abandon_from = self._draw.randrange(len(reserved.slots)) if self._draw.random() < ABANDONED else len(reserved.slots)
        for i, slot in enumerate(reserved.slots):
            if slot is None:
                continue  # another writer brings it
            if i >= abandon_from:
                self._client.abandon(slot)
                self.counts["abandoned"] += 1
                continue
            slot.buffer[:BLOCK_BYTES] = content(slot.key)
            at = available + i
            self._client.commit(slot, tokens=TOKENS, parent=keys[at - 1] if at else None)
            self.counts["written"] += 1

    def _events(self) -> list[Any]:
        events = self._client.poll(1.0)
        self._client.keepalive()
        if events and isinstance(events[-1], NodeLost):
            raise RuntimeError(f"the node is lost: {events[-1].reason}")
        for event in events:
            if isinstance(event, Granted) and event.ticket in self._cancelled:
                self._client.release(block.lease for block in event.blocks)
        return events


def run_worker(pipe: Connection, source: Source, seed: int, documents: int) -> None:
    """Until the pipe closes; tells its counters about once a second."""
    reader = Reader(source, seed, documents)
    next_tell = 0.0
    try:
        while True:
            reader.once()
            now = time.monotonic()
            if now >= next_tell:
                next_tell = now + 1.0
                reader.keepalive()
                if pipe.poll():
                    pipe.recv()
                    break
                pipe.send(dict(reader.counts))
                reader.counts.clear()
        pipe.send(dict(reader.counts))
    finally:
        reader.close()


@dataclass
class RunningWorker:
    process: BaseProcess
    pipe: Connection


class Load:
    """Keeps ``WORKERS`` workers running. Raises RuntimeError where one fails by itself."""

    def __init__(self, source: Source, documents: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._source = source
        self._documents = documents
        self._seed = 0
        self.counts: Counter[str] = Counter()
        self._workers = [self._start() for _ in range(WORKERS)]

    def look(self) -> None:
        for worker in self._workers:
            while worker.pipe.poll():
                try:
                    self.counts.update(worker.pipe.recv())
                except EOFError:
                    worker.process.join(WAIT_S)
                    raise RuntimeError(f"a worker ended by itself, status {worker.process.exitcode}") from None

    def kill_one(self) -> None:
        """In the middle of whatever it does; another one takes its place."""
        victim = self._workers.pop(0)
        assert victim.process.pid is not None
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.join(WAIT_S)
        victim.pipe.close()
        self.counts["killed"] += 1
        self._workers.append(self._start())

    def stop(self) -> None:
        for worker in self._workers:
            worker.pipe.send("stop")
        for worker in self._workers:
            worker.process.join(GIVE_UP_S + WAIT_S)
            if worker.process.exitcode != 0:
                worker.process.kill()
                raise RuntimeError(f"a worker ended with status {worker.process.exitcode}")
        self.look_at_the_rest()

    def look_at_the_rest(self) -> None:
        for worker in self._workers:
            try:
                while worker.pipe.poll():
                    self.counts.update(worker.pipe.recv())
            except EOFError:
                pass
            worker.pipe.close()

    def _start(self) -> RunningWorker:
        ours, theirs = self._context.Pipe()
        self._seed += 1
        # Whatever belongs to this process only (the pipe to the node) stays here.
        source = Source(self._source.node_id, self._source.endpoint, self._source.local_endpoint)
        process = self._context.Process(target=run_worker, args=(theirs, source, self._seed, self._documents), daemon=True)
        process.start()
        theirs.close()
        return RunningWorker(process, ours)


def own_memory(pid: int) -> int:
    """Bytes of a process that are neither shared nor from files: the arena is not among them."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


def written_by(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def growth(samples: list[tuple[float, int]], seconds: float) -> tuple[float, float]:
    """Medians of the first and of the last quarter of the samples after the warm-up."""
    late = [size for at, size in samples if at >= WARM_UP * seconds]
    quarter = max(1, len(late) // 4)
    return statistics.median(late[:quarter]), statistics.median(late[-quarter:])


def memory_faults(before: float, after: float) -> list[str]:
    if after - before > max(GROWTH_MAX_BYTES, GROWTH_MAX_SHARE * before):
        return [f"the node's memory grew from {before / MIB:.1f} to {after / MIB:.1f} MiB"]
    return []


def leak_faults(counters: dict[str, int]) -> list[str]:
    """What is still held though nobody is there."""
    held = {name: counters[name] for name in HELD if counters[name]}
    faults = [f"left behind: {held}"] if held else []
    if counters["slots_free"] + counters["slots_committed"] != counters["slots_total"]:
        faults.append(f"slots do not add up: {counters}")
    return faults


HELD: Final = (
    "leases", "clients", "slots_reserved", "slots_quarantined", "acquires_waiting", "fetches", "ssd_loads",
)  # fmt: skip


def disk_faults(ssd: dict[str, Any], kernel_bytes: int, directory: Path, capacity: int) -> list[str]:
    """The tier's two counters (the log's has the saved budgets, too) and the kernel's agree, and the files take the space they
    should."""
    faults: list[str] = []
    by_disk, by_log = ssd["disk"]["ssd_bytes_written"], ssd["log"]["bytes_written"]
    if not 0 <= by_log - by_disk <= WRITTEN_SLACK * by_disk:
        faults.append(f"the disk counts {by_disk} bytes written, the log {by_log}")
    if not by_disk <= kernel_bytes <= by_log * (1 + WRITTEN_SLACK) + MIB:
        faults.append(f"the tier counts {by_log} bytes written, the kernel {kernel_bytes}")
    taken = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    if taken > capacity + MIB:
        faults.append(f"the files take {taken} bytes of {capacity}")
    used = ssd["log"]["live_bytes"] + ssd["log"]["dead_bytes"]
    if used > capacity:
        faults.append(f"{used} bytes are said to be in use of {capacity}")
    return faults


def until_quiet(source: Source) -> dict[str, Any]:
    """The node's status once everything is given back, or as it is after ``QUIET_S``."""
    deadline = time.monotonic() + QUIET_S
    while True:
        status = source.status()
        log = status["ssd"]["log"]
        if (not leak_faults(status["counters"]) and not log["batches_in_flight"]) or time.monotonic() > deadline:
            return status
        time.sleep(0.5)


def soak(seconds: float, dram_bytes: int, parent: Path) -> list[str]:
    """What is wrong after so much time. Prints what it sees meanwhile."""
    slots = dram_bytes // BLOCK_BYTES
    documents = CAPACITIES * slots * 2 // (CHAIN_MAX + 1)
    capacity = SSD_CAPACITIES * dram_bytes // SEGMENT_BYTES * SEGMENT_BYTES
    with tempfile.TemporaryDirectory(dir=parent, prefix="soak-") as made:
        ssd = SsdSettings(directory=made, capacity=str(capacity), segment=str(SEGMENT_BYTES), dwpd=1e6)
        settings = PoolSettings(dram=str(dram_bytes), client_dead_s=3.0, lease_s=5.0)
        with node_process("soak", BLOCK_BYTES, slots, ssd, settings) as source:
            samples = _run(source, seconds, documents)
            status = until_quiet(source)
            kernel = written_by(source.pid)
            before, after = growth(samples, seconds)
            print(f"own memory {before / MIB:.1f} -> {after / MIB:.1f} MiB; written {kernel / MIB:.0f} MiB by the kernel's count")
            print("ssd", {name: status["ssd"]["log"][name] for name in ("records", "evicted_segments", "write_amplification")})
            faults = memory_faults(before, after) + leak_faults(status["counters"])
            return faults + disk_faults(status["ssd"], kernel, Path(made), capacity)


def _run(source: Source, seconds: float, documents: int) -> list[tuple[float, int]]:
    load = Load(source, documents)
    started = time.monotonic()
    samples: list[tuple[float, int]] = []
    next_kill = KILL_PERIOD_S
    while (at := time.monotonic() - started) < seconds:
        load.look()
        if at >= next_kill:
            next_kill += KILL_PERIOD_S
            load.kill_one()
        samples.append((at, own_memory(source.pid)))
        time.sleep(min(SAMPLE_S, seconds / 10))
    load.stop()
    print({name: load.counts[name] for name in sorted(load.counts)})
    if not (load.counts["written"] and load.counts["read_dram"] and load.counts["read_ssd"]):
        raise RuntimeError("the load did not reach both tiers")
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="A node under mixed load for minutes.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dram-mib", type=int, default=256, help="DRAM of the node; the SSD takes twice as much")
    parser.add_argument("--directory", type=Path, help="where the SSD tier lies (default: the system's temporary folder)")
    options = parser.parse_args()
    faults = soak(60 * options.minutes, options.dram_mib * MIB, options.directory or Path(tempfile.gettempdir()))
    for fault in faults:
        print(f"FAULT: {fault}")
    print("nothing is wrong" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
