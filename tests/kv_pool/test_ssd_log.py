"""The SSD log, rule by rule."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import Counter
from typing import Any

import pytest

from kv_pool.keys import BlockKey
from kv_pool.policy.segments import ExpiredThenDeadThenOldest, SegmentFacts
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.index import Index
from kv_pool.ssd.log import Missing, SsdLog
from kv_pool.ssd.plan import Candidate, Refusal
from kv_pool.ssd.records import PAGE, FooterEntry, Place, RecoveredSegment, WriteBatch, batch_bytes
from kv_pool.ssd.segments import SegmentState
from tests.kv_pool.ssd_twin import Medium, key_of

NOW = 1_790_000_000.0
DAY = 86_400.0
PLENTY = 1 << 60


def new_log(**changed: Any) -> SsdLog:
    """Three segments that hold four records of one page each."""
    arguments: dict[str, Any] = {
        "segments": 3,
        "segment_pages": 11,
        "ttl_s": [1000.0, 100.0],
        "budget": WriteBudget(PLENTY),
        "batches_in_flight_max": 8,
        "batch_bytes_max": 1 << 20,
        "policy": ExpiredThenDeadThenOldest(),
    }
    log = SsdLog(**(arguments | changed))
    log.recover([], NOW)
    return log


def block(number: int, parent: int | None = None, *, retention: int = 0, length: int = PAGE) -> Candidate:
    above = None if parent is None else key_of(parent)
    return Candidate(key_of(number), above, number, 16, length, number, retention, b"")


def chain(*numbers: int, retention: int = 0) -> list[Candidate]:
    return [block(n, above, retention=retention) for above, n in zip([None, *numbers], numbers, strict=False)]


def store(log: SsdLog, blocks: list[Candidate], now: float = NOW) -> list[WriteBatch]:
    """Write, flush, and answer all batches."""
    assert log.refusal(blocks, now) is None
    batches = log.write(blocks, now)[0] + log.flush(now)
    for batch in batches:
        log.written(batch.id, True, batch_bytes(batch), now)
    return batches


def numbers(keys: list[BlockKey]) -> list[int]:
    return sorted(int.from_bytes(key, "big") for key in keys)


# --- visibility -------------------------------------------------------------------------------------------------------------


def test_a_record_is_found_when_its_batch_is_answered_and_until_it_expires() -> None:
    log = new_log()
    log.write([block(1)], NOW)
    assert log.find(key_of(1), NOW) is Missing.ABSENT
    (batch,) = log.flush(NOW)
    assert log.find(key_of(1), NOW) is Missing.ABSENT
    assert log.pending(key_of(1))
    written = log.written(batch.id, True, batch_bytes(batch), NOW + 1)
    assert written.stored == [(key_of(1), None, 16)]
    assert log.find(key_of(1), NOW + 999.9) == Place(0, 1, 1, PAGE)
    assert log.find(key_of(1), NOW + 1000) is Missing.EXPIRED
    assert log.holds(key_of(1))
    assert log.expire(NOW + 1000) == [key_of(1)]
    assert log.find(key_of(1), NOW + 1000) is Missing.ABSENT
    assert log.stats(NOW).segments[SegmentState.FREE] == 3


def test_batches_take_effect_in_the_order_in_which_they_were_sent() -> None:
    log = new_log(batch_bytes_max=PAGE)
    batches, _ = log.write(chain(1, 2, 3), NOW)
    first, second, third = batches
    assert log.written(third.id, True, batch_bytes(third), NOW).stored == []
    assert log.written(second.id, True, batch_bytes(second), NOW).stored == []
    assert log.keys() == []
    assert [n for n, _, _ in log.written(first.id, True, batch_bytes(first), NOW).stored] == [key_of(n) for n in (1, 2, 3)]


def test_a_failed_batch_takes_what_follows_it_away_and_its_segment_is_left_alone() -> None:
    log = new_log(batch_bytes_max=PAGE)
    store(log, [block(9)])
    first, second = log.write([block(1)], NOW)[0] + log.write([block(5), block(2, 1)][1:], NOW)[0]
    assert log.written(second.id, True, batch_bytes(second), NOW).stored == []
    written = log.written(first.id, False, 0, NOW)
    assert written.stored == []
    assert numbers(written.failed) == [1, 2]
    assert numbers(log.keys()) == [9]
    (batch,) = store(log, [block(3)])
    assert batch.opens
    assert batch.segment != first.segment
    with pytest.raises(KeyError):
        log.written(first.id, True, 0, NOW)


def test_an_answer_twice_or_to_nothing_is_an_error() -> None:
    log = new_log(batch_bytes_max=PAGE)
    (_first, second), _ = log.write(chain(1, 2), NOW)
    log.written(second.id, True, 0, NOW)
    for unknown in (second.id, 77):
        with pytest.raises(KeyError):
            log.written(unknown, True, 0, NOW)


# --- chains -----------------------------------------------------------------------------------------------------------------


def test_only_what_is_not_here_yet_is_written() -> None:
    log = new_log()
    store(log, chain(1, 2))
    (batch,) = store(log, chain(1, 2, 3))
    assert [write.record.key for write in batch.records] == [key_of(3)]
    assert store(log, chain(1, 2, 3)) == []


def test_an_ancestor_with_less_than_half_its_life_left_is_written_again_and_moves() -> None:
    log = new_log(segment_pages=40)
    store(log, chain(1, 2))
    before = log.find(key_of(1), NOW)
    (batch,) = store(log, chain(1, 2, 3), NOW + 501)
    assert [write.record.key for write in batch.records] == [key_of(1), key_of(2), key_of(3)]
    after = log.find(key_of(1), NOW + 1400)
    assert isinstance(after, Place)
    assert after != before
    stats = log.stats(NOW + 501)
    assert (stats.live_bytes, stats.dead_bytes, stats.records_rewritten) == (3 * 2 * PAGE, 2 * 2 * PAGE, 2)


def test_while_it_is_rewritten_the_old_record_is_found_and_stays_if_that_fails() -> None:
    log = new_log(segment_pages=40)
    store(log, chain(1, 2))
    before = log.find(key_of(1), NOW)
    later = NOW + 600
    batches = log.write(chain(1, 2, 3), later)[0] + log.flush(later)
    assert log.find(key_of(1), later) == before
    written = log.written(batches[0].id, False, 0, later)
    assert numbers(written.failed) == [1, 2, 3]
    assert written.dropped == []
    assert log.find(key_of(1), later) == before
    assert numbers(log.keys()) == [1, 2]


def test_a_dropped_record_takes_all_that_follow() -> None:
    log = new_log()
    store(log, chain(1, 2, 3))
    store(log, [block(4, 2)])
    assert numbers(log.drop(key_of(2))) == [2, 3, 4]
    assert log.drop(key_of(2)) == []
    assert numbers(log.keys()) == [1]


def test_a_record_without_its_parent_is_taken_and_follows_it_once_it_is_there() -> None:
    log = new_log()
    (batch,) = store(log, [block(2, 1)])
    assert batch.records[0].record.first
    store(log, [block(1)])
    assert numbers(log.drop(key_of(1))) == [1, 2], "its parent was here and is not any more"


def test_a_record_without_its_parent_stays_when_that_fails_to_come() -> None:
    log = new_log()
    store(log, [block(2, 1)])
    batches = log.write([block(1)], NOW)[0] + log.flush(NOW)
    assert log.written(batches[0].id, False, 0, NOW).dropped == []
    assert numbers(log.keys()) == [2]


def test_what_is_on_its_way_when_its_parent_is_dropped_comes_to_nothing() -> None:
    log = new_log()
    store(log, [block(1)])
    log.write([block(2, 1)], NOW)
    (batch,) = log.flush(NOW)
    assert log.drop(key_of(1)) == [key_of(1)]
    written = log.written(batch.id, True, batch_bytes(batch), NOW)
    assert (written.stored, written.failed) == ([], [key_of(2)])
    assert log.keys() == []


@pytest.mark.parametrize(
    "blocks",
    [
        [block(1), block(2)],
        [block(1), block(1, 1)],
        [block(1, 1)],
        [block(1, 2), block(2, 1)],
        [block(5, 9)],
        [block(7, 3)],
        [block(1, retention=2)],
        [block(1, length=1 << 32)],
        [block(1, length=-1)],
        [Candidate(BlockKey(b"short"), None, 1, 16, 1, 1, 0, b"")],
        [Candidate(key_of(1), None, 1, 1 << 31, 1, 1, 0, b"")],
        [Candidate(key_of(1), None, 1, 16, 1, 1, 0, bytes(2049))],
    ],
    ids=range(12),
)
def test_a_chain_that_cannot_be_is_refused(blocks: list[Candidate]) -> None:
    """5 follows 4 here, and 6 is followed by 3 through 7: it cannot follow 7 itself."""
    log = new_log()
    store(log, [block(5, 4)])
    store(log, [block(3, 6)])
    assert log.refusal(blocks if blocks[0].key != key_of(7) else [block(7, 3), block(6, 7)], NOW) is Refusal.BAD_CHAIN
    assert log.write(blocks, NOW) == ([], []) or blocks[0].key == key_of(7)
    log.check()


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


# --- budget and other limits ------------------------------------------------------------------------------------------------


def test_bytes_are_booked_exactly_and_at_once_and_corrected_by_the_answer() -> None:
    budget = WriteBudget(PLENTY)
    log = new_log(budget=budget)
    log.write([block(1, length=1)], NOW)
    assert budget.spent(NOW) == 3 * PAGE, "segment header, record header, one page of payload"
    (batch,) = log.flush(NOW)
    log.written(batch.id, False, PAGE, NOW)
    assert budget.spent(NOW) == PAGE
    batches = store(log, chain(1, 2, 3, 4, 5))
    assert budget.spent(NOW) == PAGE + sum(batch_bytes(batch) for batch in batches)
    assert log.stats(NOW).bytes_written == budget.spent(NOW)


def test_at_the_cap_the_whole_chain_is_refused() -> None:
    log = new_log(budget=WriteBudget(7 * PAGE))
    assert log.refusal(chain(1, 2, 3, 4), NOW) is Refusal.BUDGET
    assert log.write(chain(1, 2, 3, 4), NOW) == ([], [])
    store(log, chain(1, 2, 3))
    assert log.refusal(chain(1, 2, 3), NOW) is None, "nothing to write"
    assert log.refusal([block(9)], NOW) is Refusal.BUDGET
    assert log.refusal([block(9)], NOW + DAY + 300) is None


def test_no_more_batches_than_may_be_in_flight() -> None:
    log = new_log(batches_in_flight_max=2, batch_bytes_max=PAGE)
    assert log.refusal(chain(1, 2, 3), NOW) is Refusal.TOO_LONG
    batches, _ = log.write(chain(1, 2), NOW)
    assert log.refusal([block(9)], NOW) is Refusal.BUSY
    log.written(batches[0].id, True, 0, NOW)
    assert log.refusal([block(9)], NOW) is None


def test_a_record_that_fits_no_segment_is_refused() -> None:
    log = new_log()
    assert log.refusal([block(1, length=7 * PAGE)], NOW) is None
    assert log.refusal([block(1, length=8 * PAGE)], NOW) is Refusal.TOO_LONG


@pytest.mark.parametrize(
    "changed",
    [
        {"segments": 0},
        {"segment_pages": 4},
        {"ttl_s": []},
        {"ttl_s": [1.0] * 257},
        {"ttl_s": [0.0]},
        {"batches_in_flight_max": 0},
        {"batch_bytes_max": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        new_log(**changed)


# --- the disk comes and goes ------------------------------------------------------------------------------------------------


def entry(number: int, parent: int | None, page: int, *, first: bool = False, expires: float = NOW + 500) -> FooterEntry:
    return FooterEntry(key_of(number), None if parent is None else key_of(parent), first, page, PAGE, 16, expires)


def found(number: int, *entries: FooterEntry, sealed: bool = True, generation: int = 5) -> RecoveredSegment:
    return RecoveredSegment(number, generation, 0, sealed, 1 + 2 * len(entries), entries)


def recovered(*segments: RecoveredSegment) -> SsdLog:
    log = new_log()
    log.down(NOW)
    stored = log.recover(segments, NOW)
    assert [key for key, _, _ in stored] != [] or log.keys() == []
    log.check()
    return log


def test_what_has_lost_its_parent_is_not_recovered_but_what_was_written_alone_is() -> None:
    log = recovered(found(0, entry(2, 1, 1), entry(3, 2, 3), entry(5, 4, 5, first=True), entry(6, 5, 7)))
    assert numbers(log.keys()) == [5, 6]


def test_parents_in_other_segments_count() -> None:
    log = recovered(found(0, entry(3, 2, 1)), found(1, entry(2, 1, 1)), found(2, entry(1, None, 1, first=True)))
    assert log.keys() == [key_of(n) for n in (1, 2, 3)]


def test_the_younger_of_two_is_recovered() -> None:
    older, younger = entry(1, None, 1, first=True), entry(1, None, 1, first=True, expires=NOW + 900)
    log = recovered(found(0, younger), found(1, older, generation=9))
    assert log.find(key_of(1), NOW) == Place(0, 5, 1, PAGE)
    log = recovered(found(0, older), found(1, older, generation=9))
    assert log.find(key_of(1), NOW) == Place(1, 9, 1, PAGE)


def test_where_the_younger_counts_on_a_parent_that_is_gone_the_older_will_do() -> None:
    log = recovered(found(0, entry(2, 1, 1, first=True)), found(1, entry(2, 1, 1, expires=NOW + 900), entry(3, 2, 3)))
    assert log.find(key_of(2), NOW) == Place(0, 5, 1, PAGE)
    assert numbers(log.keys()) == [2, 3]


def test_records_that_follow_each_other_in_a_circle_are_not_recovered() -> None:
    log = recovered(found(0, entry(1, 2, 1), entry(2, 1, 3), entry(4, 3, 5, first=True), entry(3, 4, 7, first=True)))
    assert log.keys() == []


def test_an_unsealed_segment_is_open_again_behind_its_last_record() -> None:
    log = recovered(found(1, entry(1, None, 1, first=True), sealed=False))
    (batch,) = store(log, [block(2, 1)])
    assert (batch.segment, batch.generation, batch.opens, batch.records[0].place.page) == (1, 5, False, 3)


def test_what_has_expired_is_not_recovered_but_its_generation_counts() -> None:
    log = recovered(found(0, entry(1, None, 1, first=True, expires=NOW)), found(1, sealed=False, generation=3))
    assert log.keys() == []
    assert {batch.segment: batch.generation for batch in store(log, chain(1, 2, 3, 4, 5, 6, 7, 8, 9)) if batch.opens} == {
        0: 6,
        1: 4,
        2: 1,
    }


def test_a_segment_of_a_class_that_is_no_more_is_kept_but_not_written() -> None:
    segment = RecoveredSegment(0, 2, 7, False, 3, (entry(1, None, 1, first=True),))
    log = recovered(segment)
    assert isinstance(log.find(key_of(1), NOW), Place)
    assert log.stats(NOW).segments[SegmentState.SEALED] == 1


@pytest.mark.parametrize("segments", [[found(3)], [found(0), found(0)], [found(-1)]])
def test_impossible_segments_are_refused(segments: list[RecoveredSegment]) -> None:
    log = new_log()
    log.down(NOW)
    with pytest.raises(ValueError):
        log.recover(segments, NOW)
    log.recover([], NOW)
    with pytest.raises(ValueError):
        log.recover([], NOW)


def test_when_the_disk_goes_nothing_is_found_and_every_key_ends_once() -> None:
    log = new_log(batch_bytes_max=2 * PAGE)
    store(log, [block(1)])
    place = log.begin_read(key_of(1))
    (batch,), _ = log.write([block(2, 1)], NOW)
    log2 = new_log()
    log2.write([block(3)], NOW)
    assert log2.down(NOW) == ([], [key_of(3)])
    assert log.down(NOW) == ([key_of(1)], [])
    assert log.find(key_of(1), NOW) is Missing.ABSENT
    assert log.refusal([block(1)], NOW) is Refusal.DOWN
    assert log.flush(NOW) == []
    log.recover([found(0, entry(1, None, 1, first=True), sealed=False, generation=1)], NOW)
    (other,) = store(log, [block(4)])
    assert other.segment != batch.segment, "a thread may still write there"
    assert log.written(batch.id, False, 0, NOW).failed == [key_of(2)]
    log.end_read(place)
    log.check()


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
