"""The node's writers: two phases, room, eviction, and writers that fall silent or die."""

from __future__ import annotations

import pytest

from kv_pool.node.messages import Abandon, Commit, ErrorCode, Goodbye, Hello, Keepalive, Reserve, SlotsReserved
from kv_pool.node.slots import InvalidSlotTransition, Slots, SlotState
from kv_pool.node.stimuli import Asked, ClientGone, ProcessGone, Publish
from tests.kv_pool.node_scene import (
    BLOCK_TOKENS,
    LIMITS,
    SLOT_BYTES,
    Scene,
    answers,
    denied,
    ended,
    grants,
    key,
    keys,
    refusals,
    removed,
    stored,
)


def test_nothing_is_visible_before_its_commit():
    scene = Scene()
    (slot,) = scene.reserve(1)
    (end,) = ended(scene.acquire(1))
    assert (end.available, end.miss) == (0, "not_found")
    assert stored(scene.commit(slot, key(1))) == [key(1)]
    assert len(grants(scene.acquire(1))) == 1


def test_the_event_of_a_block_says_how_many_tokens_it_holds_and_what_it_follows():
    scene = Scene()
    events = [a.event for a in scene.put(1, 2) if isinstance(a, Publish)]
    assert [(e.keys, e.parent, e.block_tokens) for e in events] == [
        (keys(1), None, BLOCK_TOKENS),
        (keys(2), key(1), BLOCK_TOKENS),
    ]


def test_a_second_writer_of_the_same_block_has_nothing_to_do():
    scene = Scene()
    first = scene.reserve(1)
    assert scene.reserve(1, client="r") == (None,)
    scene.commit(first[0], key(1))
    assert scene.reserve(1, client="r") == (None,)


def test_a_commit_of_somebody_elses_slot_or_of_another_key_is_refused():
    scene = Scene()
    (slot,) = scene.reserve(1)
    assert refusals(scene.commit(slot, key(1), client="r")) == [ErrorCode.NOT_RESERVED]
    assert refusals(scene.commit(slot, key(2))) == [ErrorCode.NOT_RESERVED]
    assert refusals(scene.do("r", Abandon(slot or 0))) == [ErrorCode.NOT_RESERVED]
    assert refusals(scene.commit(99, key(1))) == [ErrorCode.NOT_RESERVED]
    assert not scene.has(1)


def test_a_commit_that_was_made_already_cannot_be_made_again():
    scene = Scene()
    (slot,) = scene.reserve(1)
    scene.commit(slot, key(1))
    assert refusals(scene.commit(slot, key(1))) == [ErrorCode.NOT_RESERVED]
    assert scene.state.commits == 1


@pytest.mark.parametrize(
    "commit",
    [
        Commit(0, key(1), None, BLOCK_TOKENS, SLOT_BYTES + 1, 7, b""),
        Commit(0, key(1), None, BLOCK_TOKENS - 1, 10, 7, b""),
        Commit(0, key(1), key(1), BLOCK_TOKENS, 10, 7, b""),
    ],
    ids=["longer than a slot", "a public block that is not full", "a block that follows itself"],
)
def test_a_commit_that_cannot_be_costs_the_reservation(commit: Commit):
    scene = Scene()
    assert scene.reserve(1) == (0,)
    assert refusals(scene.do("w", commit)) == [ErrorCode.BAD_COMMIT]
    assert not scene.has(1)
    assert scene.state.slots.free == 4


def test_blocks_that_would_follow_each_other_in_a_circle_are_refused():
    """None of them could ever be evicted."""
    scene = Scene()
    first, second, third = scene.reserve(1, 2, 3)
    scene.commit(first, key(1), key(3))
    scene.commit(second, key(2), key(1))
    assert refusals(scene.commit(third, key(3), key(2))) == [ErrorCode.BAD_COMMIT]


def test_a_private_block_may_be_part_full():
    scene = Scene()
    (slot,) = scene.reserve(1, private=True)
    assert refusals(scene.commit(slot, key(1), tokens=3)) == []
    assert scene.has(1)


def test_an_abandoned_reservation_is_free_again():
    scene = Scene()
    (slot,) = scene.reserve(1)
    scene.do("w", Abandon(slot or 0))
    assert scene.state.slots.free == 4
    assert scene.reserve(1, client="r") != (None,)


def test_a_replayed_order_is_refused():
    scene = Scene()
    order = Reserve(scene.next_ticket(), keys(1), None, 1.0, False)
    assert answers(scene.do("w", order), SlotsReserved)
    assert refusals(scene.do("w", order)) == [ErrorCode.REPLAYED]
    assert scene.state.slots.free == 3


def test_a_client_of_another_machine_cannot_write():
    scene = Scene()
    assert "machine" in denied(scene.ask_reserve(keys(1), client="far"))[0]


# --- room --------------------------------------------------------------------------------------------------------------------


def test_eviction_takes_the_least_recently_used_leaf_never_a_parent_with_children():
    scene = Scene(slots=4)
    scene.put(1, 2, 3)
    scene.now = 1.0
    scene.put(9)
    scene.now = 2.0
    assert removed(scene.put(10)) == [key(3)]
    assert removed(scene.put(11)) == [key(2)]
    assert removed(scene.put(12)) == [key(1)]
    assert removed(scene.put(13)) == [key(9)]


def test_using_a_chain_saves_it():
    scene = Scene(slots=4)
    scene.put(1, 2)
    scene.now = 1.0
    scene.put(5, 6)
    scene.now = 2.0
    for grant in grants(scene.acquire(1, 2)):
        scene.release(grant)
    assert removed(scene.put(10)) == [key(6)]


def test_what_a_block_being_written_follows_is_not_evicted_for_it():
    scene = Scene(slots=4)
    scene.put(1, 2, 3, 4)
    assert scene.ask_reserve(keys(5), parent=key(4)) == []
    assert denied(scene.tick(1.0)) != []
    assert all(scene.has(i) for i in (1, 2, 3, 4))
    assert answers(scene.ask_reserve(keys(5)), SlotsReserved)  # it does not say what it follows
    assert not scene.has(4)


def test_leased_blocks_are_never_evicted_and_a_writer_waits_for_room():
    scene = Scene(slots=4)
    scene.put(0, 1, 2, 3)
    leases = grants(scene.acquire(0, 1, 2, 3))
    assert scene.ask_reserve(keys(20), timeout_s=2.0) == []
    assert scene.release(leases[0]) == []  # not a leaf
    (reserved,) = answers(scene.release(leases[3]), SlotsReserved)
    assert reserved.slots != (None,)
    assert not scene.has(3)


def test_a_writer_that_waits_too_long_is_refused():
    scene = Scene(slots=4)
    scene.put(0, 1, 2, 3)
    scene.acquire(0, 1, 2, 3)
    assert scene.ask_reserve(keys(20), timeout_s=2.0) == []
    assert scene.tick(1.9) == []
    assert "deadline" in denied(scene.tick(2.0))[0]


def test_writers_are_served_in_order_of_arrival():
    scene = Scene(slots=4)
    scene.put(0, 1, 2, 3)
    leases = grants(scene.acquire(0, 1, 2, 3))
    scene.ask_reserve(keys(20, 21), timeout_s=9.0)
    scene.ask_reserve(keys(30), client="r", timeout_s=9.0)
    assert scene.release(leases[3]) == []  # room for the second, but the first comes first
    assert [len(r.slots) for r in answers(scene.release(leases[2]), SlotsReserved)] == [2]
    assert [len(r.slots) for r in answers(scene.release(leases[1]), SlotsReserved)] == [1]


def test_nothing_is_evicted_where_it_could_not_be_enough():
    scene = Scene(slots=4)
    scene.put(0, 1, 2, 3)
    scene.acquire(0, 1)
    assert scene.ask_reserve(keys(20, 21, 22)) == []
    assert scene.has(3)


def test_more_than_the_pool_holds_is_refused_at_once():
    scene = Scene(slots=4)
    assert "do not fit" in denied(scene.ask_reserve(keys(*range(5))))[0]


def test_no_more_than_the_limit_wait_for_room():
    scene = Scene(slots=4)
    scene.put(0, 1, 2, 3)
    scene.acquire(0, 1, 2, 3)
    for i in range(LIMITS.waiting_acquires_max):
        assert scene.ask_reserve(keys(100 + i), timeout_s=9.0) == []
    assert "too many" in denied(scene.ask_reserve(keys(200), timeout_s=9.0))[0]


# --- writers that go ---------------------------------------------------------------------------------------------------------


def test_a_silent_writers_slot_is_used_again_only_when_its_process_is_gone():
    scene = Scene()
    scene.put(1)
    scene.acquire(1)
    scene.reserve(2)
    scene.tick(5.1)
    assert not scene.state.readers.leases
    assert scene.state.slots.counts()[SlotState.QUARANTINED] == 1
    scene.happens(ProcessGone(100, 2))  # the same pid, but another process
    assert scene.state.slots.free == 2
    scene.happens(ProcessGone(100, 1))
    assert scene.state.slots.free == 3


def test_a_killed_writer_gives_its_slots_back_at_once():
    scene = Scene()
    scene.reserve(1, 2)
    scene.happens(ProcessGone(100, 1))
    assert scene.state.slots.free == 4
    assert "w" not in scene.state.clients


def test_a_frozen_writer_that_wakes_is_told_and_its_slot_is_free():
    scene = Scene()
    (slot,) = scene.reserve(2)
    scene.tick(5.1)
    assert refusals(scene.commit(slot, key(2))) == [ErrorCode.UNKNOWN_CLIENT]
    assert not scene.has(2)
    assert scene.state.slots.free == 4


def test_a_key_whose_writer_fell_silent_may_be_written_by_another():
    scene = Scene()
    assert scene.reserve(2) == (0,)
    scene.happens(ClientGone("w"))
    assert scene.reserve(2, client="r") != (None,)


def test_leases_and_reservations_end_where_nobody_renews_them_though_the_client_talks():
    scene = Scene()
    scene.put(1)
    scene.acquire(1)
    for second in range(1, 11):
        scene.now = float(second)
        scene.acquire(99)
    scene.do("w", Keepalive())
    scene.tick(LIMITS.lease_s + 0.1)
    assert not scene.state.readers.leases
    assert set(scene.state.clients) == {"w"}


def test_goodbye_gives_everything_back():
    scene = Scene()
    scene.put(1)
    scene.reserve(2)
    scene.acquire(1, 3, wait=True)
    scene.do("w", Goodbye())
    scene.do("r", Goodbye())
    state = scene.state
    assert (state.readers.leases, len(state.readers.tickets), state.slots.free) == (0, 0, 3)


def test_a_stranger_is_told_to_say_hello():
    scene = Scene()
    assert refusals(scene.do("nobody", Keepalive())) == [ErrorCode.UNKNOWN_CLIENT]
    scene.happens(Asked("nobody", Hello(5, 1)))
    assert refusals(scene.do("nobody", Keepalive())) == []


def test_an_illegal_slot_move_is_an_error_and_changes_nothing():
    slots = Slots(2)
    slot = slots.take()
    slots.commit(slot)
    with pytest.raises(InvalidSlotTransition, match="COMMITTED -> QUARANTINED"):
        slots.quarantine(slot)
    slots.give_back(slot)
    with pytest.raises(InvalidSlotTransition, match="FREE -> FREE"):
        slots.give_back(slot)
    assert slots.counts()[SlotState.FREE] == slots.free == 2
