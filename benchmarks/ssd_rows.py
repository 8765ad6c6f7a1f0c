"""The SSD tier beside fio on the same disk; how many bytes it writes for a byte of blocks; how soon it is back after a crash.

The disk is that of ``$MOONPOOL_BENCH_DISK``, else of this checkout (``build/``); some 8 GiB are used there and given back.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.figures import Row, Samples, at_least, at_most
from benchmarks.harness import Fixture, SkipBenchmark, registry
from benchmarks.line_process import REPOSITORY, LineProcess
from benchmarks.peers import fio
from benchmarks.pool_pieces import MIB, ROUNDS, SIZES_MIB
from benchmarks.pool_speed import Source, Worker
from benchmarks.rounds import Round, rounds_of
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings, SsdSettings

VARIABLE: Final = "MOONPOOL_BENCH_DISK"
NEEDED_BYTES: Final = 8 << 30
START_S: Final = 120.0
ANSWER_S: Final = 600.0
ROUND_BYTES: Final = 1 << 30
SEGMENT_BYTES: Final = 256 * MIB
SEGMENTS: Final = 6
"""The warm-up and the first round write every file once; from then on all is written in place."""
MEMORY_BYTES: Final = 512 * MIB
READS_IN_FLIGHT: Final = 16
CHAIN_BYTES: Final = 32 * MIB
"""A chain leaves in one group commit or a few."""
OF_FIO: Final = 0.9

CHURN_CAPACITIES: Final = 20
CHURN_SEGMENTS: Final = 16
CHURN_SEGMENT_BYTES: Final = 64 * MIB
CHURN_CHAIN: Final = 8

RESTART_RECORDS: Final = 20_000
RESTART_BLOCK_BYTES: Final = 64 * 1024
RESTART_SEGMENT_BYTES: Final = 16 * MIB
"""Small records in small segments: as many files as 20,000 blocks of 1 MiB take in segments of 256 MiB."""
RESTART_SEGMENTS: Final = 100
RESTART_CHAIN: Final = 32
RESTART_SLOTS: Final = 4 * RESTART_CHAIN


@contextmanager
def _disk() -> Iterator[Path]:
    parent = Path(os.environ.get(VARIABLE) or REPOSITORY / "build")
    parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(parent).free) < NEEDED_BYTES:
        raise SkipBenchmark(f"{NEEDED_BYTES >> 30} GiB of disk are needed, {free >> 30} GiB are free ({VARIABLE} names another)")
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-disk-") as made:
        yield Path(made)


disk: Final = Fixture("bench disk", _disk)


@contextmanager
def tier(directory: Path, *, segments: int, segment_bytes: int, block_bytes: int, slots: int) -> Iterator[LineProcess]:
    """The tier in a new process; its directory stays."""
    numbers = map(str, (segments, segment_bytes, block_bytes, slots))
    command = [sys.executable, "-m", "benchmarks.ssd_child", str(directory), *numbers]
    with LineProcess("the SSD tier", command, start_timeout_s=START_S) as child:
        yield child


@contextmanager
def _empty(directory: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, with what it took of the disk."""
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def beside_fio(size_mib: int) -> Callable[[Path], Iterator[Row]]:
    """Sequential, direct, several in flight; each writes its own files in place, and reads what it wrote in the same round."""

    def measure(folder: Path) -> Iterator[Row]:
        fio.executable()
        block = size_mib * MIB
        records = ROUND_BYTES // block

        def rate(child: LineProcess, **question: object) -> float:
            return ROUND_BYTES / child.ask(ANSWER_S, **question)["seconds"] / 1e9

        with (
            _empty(folder / f"log-{size_mib}") as directory,
            tier(
                directory, segments=SEGMENTS, segment_bytes=SEGMENT_BYTES, block_bytes=block, slots=MEMORY_BYTES // block
            ) as child,
        ):

            def once() -> Round:
                return {
                    "write": rate(child, do="write", records=records, chain=max(1, CHAIN_BYTES // block)),
                    "fio_write": fio.gigabytes_per_s(folder, "write", block, ROUND_BYTES),
                    "read": rate(child, do="read", in_flight=READS_IN_FLIGHT),
                    "fio_read": fio.gigabytes_per_s(folder, "read", block, ROUND_BYTES),
                }

            once()
            figures = rounds_of(ROUNDS, once)
        for verb in ("write", "read"):
            yield figures[verb].row_beside(
                f"ssd_{verb}_{size_mib}", "GB/s", figures[f"fio_{verb}"], "fio", target=at_least(OF_FIO)
            )

    return measure


for _size in SIZES_MIB:
    registry.benchmark(f"ssd_write_{_size}", f"ssd_read_{_size}", needs=[disk])(beside_fio(_size))


@registry.benchmark("ssd_write_amplification", needs=[disk])
def amplification(folder: Path) -> Iterator[Row]:
    """Bytes written for a byte of blocks, headers, padding, footers and the saved budget included: what the kernel counts, with
    what the tier counts beside it. 20 times the capacity, chains of 1 to 8 blocks of 1 MiB, three retention classes."""
    with (
        _empty(folder / "churn") as directory,
        tier(
            directory, segments=CHURN_SEGMENTS, segment_bytes=CHURN_SEGMENT_BYTES, block_bytes=MIB, slots=MEMORY_BYTES // MIB
        ) as child,
    ):
        total = CHURN_CAPACITIES * CHURN_SEGMENTS * CHURN_SEGMENT_BYTES
        answer = child.ask(ANSWER_S, do="churn", bytes=total, chain=CHURN_CHAIN)
    kernel, counted = answer["kernel"] / answer["payload"], answer["counted"] / answer["payload"]
    yield Row("ssd_write_amplification", kernel, "ratio", counted, "the tier's own count", None, at_most(1.02))


@registry.benchmark("restart_20000", "restart_20000_tier", needs=[disk])
def restart(folder: Path) -> Iterator[Row]:
    """On the directory of a process that was killed: a node, until a worker has been granted a block from its SSD; and the tier
    alone, in a new process, until it has read a record. Nothing is in the page cache."""
    sizes = {
        "segments": RESTART_SEGMENTS,
        "segment_bytes": RESTART_SEGMENT_BYTES,
        "block_bytes": RESTART_BLOCK_BYTES,
        "slots": RESTART_SLOTS,
    }
    with _empty(folder / "restart") as directory:
        with tier(directory, **sizes) as child:
            root = BlockKey(bytes.fromhex(child.ask(ANSWER_S, do="write", records=RESTART_RECORDS, chain=RESTART_CHAIN)["root"]))
            os.kill(child.pid, signal.SIGKILL)
        taken: list[float] = []
        served: list[float] = []
        for _ in range(ROUNDS):
            forget_pages(directory)
            with tier(directory, **sizes) as child:
                if child.started["records"] != RESTART_RECORDS:
                    raise RuntimeError(f"{child.started['records']} of {RESTART_RECORDS} records are there after a crash")
                taken.append(child.started["seconds"])
            forget_pages(directory)
            served.append(seconds_to_serving(directory, root))
    yield Samples(tuple(served)).row("restart_20000", "s", target=at_most(2.0))
    yield Samples(tuple(taken)).row("restart_20000_tier", "s")


def seconds_to_serving(directory: Path, key: BlockKey) -> float:
    """From making a node until a worker of it has a lease on ``key``, which lies on its SSD."""
    capacity = str(RESTART_SEGMENTS * RESTART_SEGMENT_BYTES)
    ssd = SsdSettings(directory=str(directory), capacity=capacity, segment=str(RESTART_SEGMENT_BYTES))
    settings = PoolSettings(dram=str(RESTART_SLOTS * RESTART_BLOCK_BYTES))
    started = time.perf_counter()
    node = PoolNode(node_id="restart", slot_bytes=RESTART_BLOCK_BYTES, settings=settings, ssd=ssd)
    node.start()
    try:
        worker = Worker(Source("restart", node.endpoint, node.local_endpoint), RESTART_BLOCK_BYTES)
        while not worker.has(key):
            if time.perf_counter() - started > START_S:
                raise RuntimeError(f"the node has no block in {START_S:g} s after its start")
        seconds = time.perf_counter() - started
        worker.close()
    finally:
        node.stop()
    return seconds


def forget_pages(directory: Path) -> None:
    """Drop what the page cache has of the files in ``directory``."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
