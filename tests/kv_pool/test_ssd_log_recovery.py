"""The disk goes and comes back: what the SSD log finds again."""

from __future__ import annotations

import pytest

from kv_pool.ssd.log import Missing, SsdLog
from kv_pool.ssd.plan import Refusal
from kv_pool.ssd.records import PAGE, FooterEntry, Place, RecoveredSegment
from kv_pool.ssd.segments import SegmentState
from tests.kv_pool.ssd_log_scene import NOW, block, chain, new_log, numbers, store
from tests.kv_pool.ssd_twin import key_of

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
