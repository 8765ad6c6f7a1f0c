"""The SSD tier's log and disk without a node around them: an owner that writes chains out of an arena and reads them back.

Everything here is what the node's thread does, turn by turn: hand batches to the disk, take what came back, tell the log.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from kv_pool.arena import Arena
from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.policy.segments import ExpiredThenDeadThenOldest
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.disk.disk import SsdDisk
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.plan import Candidate, Refusal
from kv_pool.ssd.records import PAGE, BatchWritten, DiskDown, DiskEvent, DiskUp, Place, ReadRecord, RecordRead, WriteBatch

WAIT_S: Final = 60.0
TICK_S: Final = 0.25
DAY_S: Final = 86400.0
NO_LIMIT: Final = 1 << 60
BATCHES_IN_FLIGHT: Final = 4
BATCH_BYTES: Final = 32 << 20
THREADS: Final = 4
TOKENS: Final = 64
SAVE_BUDGET_S: Final = 5.0


class SsdOwner:
    """A log of ``segments`` segments in ``directory``, and an arena of ``slots`` slots to write from and read into. Every slot
    is filled with bytes of its own, whose checksum goes with them. Raises RuntimeError where the disk goes down or hangs.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segments: int,
        segment_bytes: int,
        slot_bytes: int,
        slots: int,
        ttl_s: Sequence[float] = (DAY_S,),
    ) -> None:
        self._arena = Arena.create(slots, slot_bytes)
        self._length = slot_bytes
        self._checksums = [self._fill(slot) for slot in range(slots)]
        self._slots = slots
        self._free = list(range(slots))
        self._slot_of: dict[BlockKey, int] = {}
        self._woken = threading.Event()
        self._job = itertools.count()
        self._reads: dict[int, tuple[Place, int]] = {}
        self._next_tick = self._next_save = 0.0
        self.budget = WriteBudget(NO_LIMIT)
        self.bytes_read = 0
        self.log = SsdLog(
            segments=segments,
            segment_pages=segment_bytes // PAGE,
            ttl_s=ttl_s,
            budget=self.budget,
            batches_in_flight_max=BATCHES_IN_FLIGHT,
            batch_bytes_max=BATCH_BYTES,
            policy=ExpiredThenDeadThenOldest(),
        )
        self.disk = SsdDisk(
            directory=str(directory),
            segments=segments,
            segment_bytes=segment_bytes,
            slot=self._arena.slot,
            wake=self._woken.set,
            threads=THREADS,
        )
        self.up = False
        self.recovered = 0

    def __enter__(self) -> SsdOwner:
        self.disk.start()
        self._until(lambda: self.up)
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.stop(WAIT_S)
        self._arena.close()

    # --- writing ------------------------------------------------------------------------------------------------------------

    def write_chain(self, keys: Sequence[BlockKey], retention: int = 0) -> None:
        """Put a chain on its way; waits for slots and for room, not for the medium."""
        self._until(lambda: len(self._free) >= len(keys), flush=True)
        chain: list[Candidate] = []
        parent: BlockKey | None = None
        for key in keys:
            slot = self._slot_of[key] = self._free.pop()
            chain.append(Candidate(key, parent, slot, TOKENS, self._length, self._checksums[slot], retention, b""))
            parent = key
        while True:
            batches, _ = self.log.write(chain, time.time())
            if batches or self.log.pending(keys[-1]):
                break
            refusal = self.log.refusal(chain, time.time())
            if refusal not in (Refusal.BUSY, Refusal.NO_SEGMENT):
                raise RuntimeError(f"a chain of {len(keys)} blocks was refused: {refusal}")
            self._turn()
        self._send(batches)

    def finish(self) -> None:
        """Wait until everything is on the medium."""
        self._until(lambda: not self._slot_of, flush=True)

    # --- reading ------------------------------------------------------------------------------------------------------------

    def read_all(self, keys: Sequence[BlockKey], in_flight: int) -> None:
        """Read blocks in this order, so many at a time, checked by the disk. Raises RuntimeError for one that is not there."""
        for key in keys:
            self._until(lambda: bool(self._free) and len(self._reads) < in_flight)
            place, slot, job = self.log.begin_read(key), self._free.pop(), next(self._job)
            self._reads[job] = (place, slot)
            self.disk.read(ReadRecord(job, place, key, slot))
        self._until(lambda: not self._reads)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _fill(self, slot: int) -> int:
        view = self._arena.slot(slot)
        view[:] = (random.Random(slot).randbytes(PAGE) * (-(-self._length // PAGE)))[: self._length]
        return xxhash.xxh3_64_intdigest(view)

    def _send(self, batches: Sequence[WriteBatch]) -> None:
        for batch in batches:
            self.disk.write(batch)

    def _until(self, condition: Callable[[], bool], *, flush: bool = False) -> None:
        """``flush``: what waits for more is sent, as far as batches may be in flight."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the disk did not get there in {WAIT_S:g} s")
            if flush:
                self._send(self.log.flush(time.time()))
            self._turn()

    def _turn(self) -> None:
        self._woken.wait(TICK_S)
        self._woken.clear()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self.disk.tick(now)
        if now >= self._next_save:
            self._next_save = now + SAVE_BUDGET_S
            self.disk.save_budget(self.budget.pack())
        for event in self.disk.take():
            self._take(event)

    def _take(self, event: DiskEvent) -> None:
        match event:
            case DiskUp(segments):
                self.recovered = len(self.log.recover(segments, time.time()))
                self.up = True
            case DiskDown(reason):
                raise RuntimeError(f"the disk is down: {reason}")
            case BatchWritten(number, ok, bytes_written):
                written = self.log.written(number, ok, bytes_written, time.time())
                if not ok or written.failed:
                    raise RuntimeError(f"{len(written.failed)} records of batch {number} were not written")
                for key, _, _ in written.stored:
                    self._free.append(self._slot_of.pop(key))
            case RecordRead(job, record, fault):
                place, slot = self._reads.pop(job)
                self.log.end_read(place)
                self._free.append(slot)
                if record is None:
                    raise RuntimeError(f"a record could not be read: {fault}")
                self.bytes_read += record.length
                self._checksums[slot] = record.checksum  # the slot has other bytes now


def chains(series: int, count: int, length: int) -> Iterator[list[BlockKey]]:
    """``count`` keys in chains of ``length``, others for every series."""
    for first in range(0, count, length):
        data = random.Random(f"{series}:{first}").randbytes(KEY_BYTES * min(length, count - first))
        yield [BlockKey(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]
