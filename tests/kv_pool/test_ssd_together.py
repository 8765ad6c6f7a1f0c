"""The log and the disk together, on real files: churn, restart, check."""

from __future__ import annotations

import random
from pathlib import Path

import xxhash

from kv_pool.keys import BlockKey
from kv_pool.policy.segments import ExpiredThenDeadThenOldest
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.plan import Candidate
from kv_pool.ssd.records import PAGE, BatchWritten, DiskUp, Place, ReadRecord, RecordRead
from kv_pool.ssd.verify import Verification
from tests.kv_pool.ssd_scene import Scene, key_of, payload_of

SEGMENTS = 12
SEGMENT_PAGES = 256
CHAIN_BLOCKS = 4
LENGTH_MAX = 12 * PAGE
NOW = 1_000_000.0


class Node:
    """A disk, its log, and what was told of both."""

    def __init__(self, directory: Path) -> None:
        self.scene = Scene(
            str(directory),
            segments=SEGMENTS,
            segment_bytes=SEGMENT_PAGES * PAGE,
            slots=CHAIN_BLOCKS,
            slot_bytes=LENGTH_MAX,
            threads=3,
        )
        self.log = SsdLog(
            segments=SEGMENTS,
            segment_pages=SEGMENT_PAGES,
            ttl_s=(1000.0, 2000.0, 4000.0),
            budget=WriteBudget(2**40),
            batches_in_flight_max=8,
            batch_bytes_max=64 * PAGE,
            policy=ExpiredThenDeadThenOldest(),
        )
        up: DiskUp = self.scene.start()
        self.found = {key for key, _, _ in self.log.recover(up.segments, NOW)}

    def write(self, first: int, blocks: int, draw: random.Random, now: float) -> None:
        """A chain of blocks ``first`` ..., as far as it gets."""
        chain: list[Candidate] = []
        retention = draw.randrange(3)
        parent: BlockKey | None = None
        for slot in range(blocks):
            key, length = key_of(first + slot), draw.randint(1, LENGTH_MAX)
            payload = payload_of(key, length)
            self.scene.arena.slot(slot)[:length] = payload
            chain.append(Candidate(key, parent, slot, 16, length, xxhash.xxh3_64_intdigest(payload), retention, b""))
            parent = key
        assert self.log.refusal(chain, now) is None
        batches, _ = self.log.write(chain, now)
        batches += self.log.flush(now)
        for batch in batches:
            self.scene.disk.write(batch)
        for batch in batches:
            answer = self.scene.wait_for(BatchWritten, batch.id)
            assert answer.ok
            self.log.written(answer.id, answer.ok, answer.bytes_written, now)
        assert all(self.log.holds(candidate.key) for candidate in chain)

    def check_reads(self, now: float) -> int:
        """Every record that the log knows is on the disk, with the right bytes."""
        for key in list(self.log.keys()):
            place = self.log.find(key, now)
            assert isinstance(place, Place)
            self.scene.disk.read(ReadRecord(7, place, key, 0))
            answer = self.scene.wait_for(RecordRead, 7)
            assert answer.record is not None, answer
            assert bytes(self.scene.arena.slot(0)[: place.length]) == payload_of(key, place.length)
        return len(self.log)


def test_churn_restart_and_check(tmp_path: Path):
    draw = random.Random(1)
    node = Node(tmp_path)
    number = 0
    capacity = SEGMENTS * SEGMENT_PAGES * PAGE
    while node.log.stats(NOW).bytes_written < 3 * capacity:
        blocks = draw.randint(1, CHAIN_BLOCKS)
        node.write(number, blocks, draw, NOW)
        number += blocks
    stats = node.log.stats(NOW)
    assert stats.evicted_segments > SEGMENTS
    assert stats.bytes_written == node.scene.disk.stats()["ssd_bytes_written"]
    assert node.check_reads(NOW) > 100
    keys = set(node.log.keys())
    node.scene.stop()
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kv")) == capacity
    with Verification(str(tmp_path), now=NOW) as verification:
        assert list(verification.bad_records()) == []
    assert verification.report.good >= len(keys)
    node = Node(tmp_path)
    assert node.found >= keys, "all that was there is there, and perhaps what had to leave before its segment died"
    node.check_reads(NOW)
    node.write(number, 3, draw, NOW)
    node.check_reads(NOW)
    node.scene.stop()
