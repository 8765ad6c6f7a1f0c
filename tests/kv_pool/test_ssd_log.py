"""The SSD log, rule by rule: what is found, what is written, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kv_pool.keys import BlockKey
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.log import Missing
from kv_pool.ssd.plan import Candidate, Refusal
from kv_pool.ssd.records import PAGE, Place, batch_bytes
from kv_pool.ssd.segments import SegmentState
from tests.kv_pool.ssd_log_scene import DAY, NOW, PLENTY, block, chain, new_log, numbers, store
from tests.kv_pool.ssd_twin import key_of

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
