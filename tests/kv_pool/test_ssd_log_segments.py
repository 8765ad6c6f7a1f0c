"""The segments of the SSD log: what goes into which, which one dies, and what that costs in the long run."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import Counter

import pytest

from kv_pool.policy.segments import ExpiredThenDeadThenOldest, SegmentFacts
from kv_pool.ssd.index import Index
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.plan import Candidate, Refusal
from kv_pool.ssd.records import PAGE, batch_bytes
from kv_pool.ssd.segments import SegmentState
from tests.kv_pool.ssd_log_scene import NOW, block, chain, new_log, numbers, store
from tests.kv_pool.ssd_twin import Medium, key_of

# --- segments ---------------------------------------------------------------------------------------------------------------


def test_a_full_segment_is_sealed_with_its_footer_behind_the_last_record() -> None:
    log = new_log()
    batches = store(log, chain(1, 2, 3, 4, 5))
    sealing, opening = batches
    assert sealing.footer is not None
    assert sealing.footer.page == 9
    assert [entry.key for entry in sealing.footer.entries] == [key_of(n) for n in (1, 2, 3, 4)]
    assert [entry.first for entry in sealing.footer.entries] == [True, False, False, False]
    assert (opening.opens, opening.generation) == (True, 1)


def test_what_is_dead_when_a_segment_is_sealed_is_not_in_its_footer() -> None:
    log = new_log()
    store(log, [block(1)])
    store(log, [block(2)])
    log.drop(key_of(1))
    sealing = store(log, [block(n) for n in (3,)]) + store(log, [block(4)]) + store(log, [block(5)])
    (footer,) = [batch.footer for batch in sealing if batch.footer is not None]
    assert numbers([entry.key for entry in footer.entries]) == [2, 3, 4]


def test_classes_do_not_share_a_segment_and_a_child_is_not_sent_before_its_parent() -> None:
    log = new_log()
    batches, _ = log.write([block(1), block(2, 1, retention=1)], NOW)
    batches += log.flush(NOW)
    assert [(batch.retention, [write.record.key for write in batch.records]) for batch in batches] == [
        (0, [key_of(1)]),
        (1, [key_of(2)]),
    ]
    assert batches[0].segment != batches[1].segment


def test_expiries_far_apart_close_a_segment_once_it_is_half_full() -> None:
    log = new_log()
    (first,) = store(log, [block(1)])
    (second,) = store(log, [block(2)], NOW + 300)
    assert (second.segment, second.opens) == (first.segment, False), "not half full"
    (third,) = store(log, [block(3)], NOW + 300)
    assert third.segment == first.segment
    sealing, other = store(log, [block(4)], NOW + 301)
    assert (sealing.segment, sealing.records) == (first.segment, ())
    assert sealing.footer is not None
    assert other.segment != first.segment


def fill(log: SsdLog, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        store(log, [block(number)])


def test_when_none_is_free_a_sealed_one_dies_whole_and_its_number_goes_up() -> None:
    log = new_log()
    fill(log, 12)
    log.touch(key_of(1), NOW + 5)
    batches, dropped = log.write([block(13)], NOW)
    assert numbers(dropped) == [5, 6, 7, 8], "the first was touched, the third is still open"
    assert log.stats(NOW).evicted_segments == 1
    batches += log.flush(NOW)
    opening = batches[-1]
    assert (opening.segment, opening.generation, opening.opens) == (1, 2, True)


def test_a_segment_that_is_read_is_not_used_again() -> None:
    log = new_log()
    fill(log, 12)
    first = log.begin_read(key_of(1))
    assert numbers(log.write([block(13)], NOW)[1]) == [5, 6, 7, 8]
    second = log.begin_read(key_of(9))
    fill(log, 3, 14)
    assert log.refusal([block(17)], NOW) is Refusal.NO_SEGMENT
    log.end_read(first)
    log.end_read(second)
    assert log.refusal([block(17)], NOW) is None
    with pytest.raises(KeyError):
        log.end_read(second)


def test_an_expired_segment_that_is_read_dies_after_the_last_reader() -> None:
    log = new_log()
    fill(log, 1)
    place = log.begin_read(key_of(1))
    assert log.expire(NOW + 1000) == [key_of(1)]
    assert log.stats(NOW).segments[SegmentState.DYING] == 1
    log.end_read(place)
    assert log.stats(NOW).segments[SegmentState.FREE] == 3
    with pytest.raises(KeyError):
        log.begin_read(key_of(1))


def test_a_chain_never_eats_what_it_builds_on() -> None:
    log = new_log()
    store(log, chain(1, 2, 3, 4))
    fill(log, 8, 20)
    assert numbers(log.write([block(5, 4)], NOW)[1]) == [20, 21, 22, 23]
    log.flush(NOW)
    log.check()


def test_the_policy_names_the_expired_then_the_dead_then_the_oldest() -> None:
    policy = ExpiredThenDeadThenOldest()
    facts = [
        SegmentFacts(1, 0, live_bytes=90, used_bytes=100, expires_at=50, touched_at=1),
        SegmentFacts(2, 0, live_bytes=40, used_bytes=100, expires_at=60, touched_at=5),
        SegmentFacts(3, 0, live_bytes=30, used_bytes=100, expires_at=60, touched_at=9),
        SegmentFacts(4, 0, live_bytes=95, used_bytes=100, expires_at=20, touched_at=9),
        SegmentFacts(5, 0, live_bytes=90, used_bytes=100, expires_at=50, touched_at=2),
    ]
    order: list[int] = []
    while facts:
        victim = policy.victim(facts, 25.0)
        assert victim is not None
        order.append(victim)
        facts = [fact for fact in facts if fact.id != victim]
    assert order == [4, 3, 2, 1, 5]
    assert policy.victim([], 0.0) is None


# --- at length --------------------------------------------------------------------------------------------------------------


def churn(block_bytes: int, segment_bytes: int, segments: int, times: int) -> tuple[SsdLog, int, int, Counter[int]]:
    """Fill the log over and over with three classes of chains, some of which grow; returns it, bytes written and admitted."""
    capacity = segments * segment_bytes
    log = new_log(
        segments=segments,
        segment_pages=segment_bytes // PAGE,
        ttl_s=[300.0, 1800.0, 14_400.0],
        batch_bytes_max=8 << 20,
        batches_in_flight_max=16,
    )
    medium, now, number, slot = Medium(), NOW, 0, 0
    written = admitted = 0
    classes: Counter[int] = Counter()
    while admitted < times * capacity:
        retention = (0, 0, 0, 1, 1, 2)[number % 6]
        length = 1 + number % 7
        blocks: list[Candidate] = []
        for _ in range(length):
            slot += 1
            parent = blocks[-1].key if blocks else None
            blocks.append(Candidate(key_of(slot), parent, slot % 1000, 64, block_bytes, 0, retention, b"{}"))
        number += 1
        now += 0.05 * length
        batches, _ = log.write(blocks, now)
        for batch in batches + log.flush(now):
            medium.sent(batch)
            written += batch_bytes(batch)
            log.written(batch.id, True, batch_bytes(batch), now)
            admitted += sum(write.record.length for write in batch.records)
            classes[batch.retention] += len(batch.records)
        log.expire(now)
    return log, written, admitted, classes


def test_write_amplification_of_twenty_times_the_capacity() -> None:
    log, written, admitted, classes = churn(1 << 20, 64 << 20, 16, 20)
    stats = log.stats(NOW)
    assert set(classes) == {0, 1, 2}
    assert stats.bytes_written == written
    assert stats.bytes_admitted == admitted
    assert stats.evicted_segments > 0
    assert written / admitted <= 1.02
    log.check()


MEASURE = """
import gc
from tests.kv_pool.test_ssd_log import *
from kv_pool.ssd.records import record_pages

def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE

def grow(log, first, count):
    for start in range(first, first + count, 100):
        blocks = []
        for number in range(start, start + 100):
            # Keys of their own, as they come off the wire.
            blocks.append(Candidate(key_of(number), blocks[-1].key if blocks else None, 0, 64, 1, 0, 0, b""))
        for batch in log.write(blocks, NOW)[0] + log.flush(NOW):
            log.written(batch.id, True, batch_bytes(batch), NOW)

def log_of(records):
    return new_log(segments=records // 1000 + 1, segment_pages=2 + 1000 * record_pages(1) + 64, ttl_s=[DAY])

grow(log_of(10_000), 0, 10_000)
before = resident()
log = log_of(1_000_000)
grow(log, 10_000, 1_000_000)
assert len(log) == 1_000_000
print((resident() - before) / len(log))
"""


@pytest.mark.slow
def test_a_million_records_take_at_most_200_bytes_each() -> None:
    """Resident memory of a process of its own, so everything counts: keys, dict, arrays, segments, what the allocator wastes."""
    measured = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=200, check=True)
    assert 50 < float(measured.stdout) <= 200


def test_the_index_reuses_rows_and_keeps_families_together() -> None:
    index = Index()
    rows = [index.ensure(key_of(n), key_of(1) if n > 1 else None) for n in range(1, 6)]
    assert sorted(index.children(rows[0])) == rows[1:]
    index.remove(rows[2])
    assert sorted(index.children(rows[0])) == [rows[1], rows[3], rows[4]]
    assert index.row(key_of(3)) is None
    assert index.ensure(key_of(7), key_of(2)) == rows[2]
    assert index.parent(rows[2]) == rows[1]
    assert array("I", index.walk())[0] == rows[0]
    assert len(index) == 5
