"""The node's readers: waiting, leases, private blocks, pulls of other nodes, and blocks on their way from other nodes."""

from __future__ import annotations

import pytest

from kv_pool.node.messages import Abandon, Cancel, Goodbye, Keepalive, Miss, Peer, Release, Stalled, Tier
from kv_pool.node.stimuli import CancelFetch, ClientGone, FetchEnded, FetchStalled, Land, SendBlock
from tests.kv_pool.node_scene import (
    LIMITS,
    OTHER_PEER,
    PEER,
    Scene,
    answers,
    ended,
    fetches,
    grants,
    key,
    keys,
    removed,
    stored,
)


def test_without_waiting_the_longest_prefix_that_is_there_is_granted():
    scene = Scene()
    scene.put(1, 2)
    actions = scene.acquire(1, 2, 3)
    assert [g.key for g in grants(actions)] == [key(1), key(2)]
    assert [(e.available, e.miss) for e in ended(actions)] == [(2, Miss.NOT_FOUND)]


def test_a_waiting_acquire_is_granted_block_by_block_as_they_are_committed():
    scene = Scene()
    assert scene.acquire(1, 2, wait=True) == []
    slots = scene.reserve(1, 2)
    assert [g.key for g in grants(scene.commit(slots[0], key(1)))] == [key(1)]
    actions = scene.commit(slots[1], key(2), key(1))
    assert [g.key for g in grants(actions)] == [key(2)]
    assert [(e.available, e.miss) for e in ended(actions)] == [(2, None)]


def test_a_waiting_acquire_ends_late_and_leaves_nothing_parked():
    scene = Scene()
    scene.acquire(1, wait=True, timeout_s=3.0)
    assert scene.state.next_deadline() == 3.0
    assert scene.tick(2.9) == []
    assert ended(scene.tick(3.0))[0].miss is Miss.LATE
    assert not scene.state.readers.tickets


def test_a_cancelled_acquire_gets_nothing_more_and_keeps_what_it_has():
    scene = Scene()
    scene.put(1)
    (grant,) = grants(scene.acquire(1, 2, wait=True))
    assert scene.do("r", Cancel(scene.ticket)) == []
    assert grants(scene.put(2)) == []
    assert scene.leases() == {grant.lease}


def test_no_more_than_the_limit_wait():
    scene = Scene()
    for _ in range(LIMITS.waiting_acquires_max):
        assert scene.acquire(1, wait=True) == []
    assert ended(scene.acquire(1, wait=True))[0].miss is Miss.REFUSED
    scene.put(2)
    assert len(grants(scene.acquire(2))) == 1  # what need not wait is served


def test_a_lease_is_its_holders_and_ends_once():
    scene = Scene()
    scene.put(1)
    grant = scene.lease(1)
    scene.release(grant, client="w")
    assert scene.leases() == {grant.lease}
    scene.release(grant)
    scene.release(grant)
    assert not scene.state.readers.leases


def test_a_private_block_is_unknown_to_others_read_once_and_gone():
    scene = Scene()
    assert stored(scene.put(1, private=True)) == []
    assert scene.state.blocks.public_keys() == []
    grant = scene.lease(1)
    assert removed(scene.release(grant, consume=True)) == []
    assert not scene.has(1)
    assert scene.state.slots.free == 4


def test_consume_does_not_delete_a_public_block():
    scene = Scene()
    scene.put(1)
    scene.release(scene.lease(1), consume=True)
    assert scene.has(1)


def test_a_private_block_that_nobody_fetches_expires_but_its_slot_waits_for_a_reader():
    scene = Scene()
    scene.put(1, 2, private=True)
    scene.now = LIMITS.handoff_ttl_s - 1
    grant = scene.lease(1)
    scene.do("r", Keepalive())
    scene.tick(LIMITS.handoff_ttl_s)
    assert not scene.has(1)
    assert not scene.has(2)
    assert scene.state.slots.free == 3
    assert scene.reserve(1, private=True, client="r") != (None,)  # the key may be written anew meanwhile
    assert scene.state.slots.free == 2
    scene.release(grant)
    assert scene.state.slots.free == 3


def test_a_private_block_is_not_evicted():
    scene = Scene(slots=4)
    scene.put(1, 2, 3, 4, private=True)
    assert scene.ask_reserve(keys(9)) == []
    assert scene.has(4)


def test_a_slots_epoch_changes_with_every_owner():
    scene = Scene(slots=4)
    scene.put(1)
    grant = scene.lease(1)
    assert scene.state.slots.epoch(grant.slot) == grant.epoch
    scene.release(grant)
    scene.put(10, 11, 12)
    scene.put(13)
    assert scene.state.slots.epoch(grant.slot) > grant.epoch


# --- pulls of another node ---------------------------------------------------------------------------------------------------


def test_a_pull_gets_no_more_blocks_than_it_has_credits_until_it_returns_some():
    scene = Scene()
    scene.put(1, 2, 3, 4)
    first = scene.pull(1, 2, 3, 4)
    assert [g.key for g in grants(first)] == [key(1), key(2)]
    assert all(isinstance(a, SendBlock) for a in first)
    more = scene.release(grants(first)[0], client="far")
    assert [g.key for g in grants(more)] == [key(3)]
    last = scene.release(grants(first)[1], client="far")
    assert [g.key for g in grants(last)] == [key(4)]
    assert ended(last)[0].available == 4


def test_a_pull_may_want_fewer_credits_and_all_pulls_of_a_node_share_them():
    scene = Scene()
    scene.put(1, 2, 3)
    (grant,) = grants(scene.pull(1, 2, credits_=1))
    assert grants(scene.pull(3)) != []
    scene.release(grant, client="far")
    assert len(scene.state.clients["far"].on_the_way) == 1


def test_a_pull_that_waits_says_so_and_takes_no_credit():
    scene = Scene()
    scene.put(1)
    actions = scene.pull(1, 2, wait=True)
    assert answers(actions, Stalled) == [Stalled(scene.ticket)]
    scene.release(grants(actions)[0], client="far")
    assert len(grants(scene.put(2))) == 1


def test_a_node_that_goes_leaves_nothing_on_the_way():
    scene = Scene()
    scene.put(1, 2, 3)
    scene.pull(1, 2, 3)
    scene.happens(ClientGone("far"))
    assert not scene.state.readers.leases
    assert not scene.state.readers.tickets


# --- fetches -----------------------------------------------------------------------------------------------------------------


def test_two_acquires_of_one_remote_block_cause_one_fetch():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, 2, source=PEER))
    assert fetch.keys == keys(1, 2)
    assert scene.acquire(1, 2, source=PEER, client="w") == []
    actions = scene.arrives(fetch.fetch, 1) + scene.arrives(fetch.fetch, 2)
    assert [g.tier for g in grants(actions)] == [Tier.REMOTE_DRAM] * 4
    assert [(e.available, e.miss) for e in ended(actions)] == [(2, None)] * 2
    scene.happens(FetchEnded(fetch.fetch, None))
    assert grants(scene.acquire(1, source=PEER))[0].tier is Tier.DRAM  # it is here now


def test_a_node_is_no_source_for_itself():
    scene = Scene()
    itself = Peer("node-a", "tcp://127.0.0.1:20000")
    assert ended(scene.acquire(1, source=itself))[0].miss is Miss.NOT_FOUND
    assert scene.acquire(1, source=itself, wait=True) == []
    assert len(grants(scene.put(1))) == 1


def test_only_what_is_missing_and_not_under_way_is_fetched():
    scene = Scene()
    scene.put(2)
    (first,) = fetches(scene.acquire(1, 2, 3, source=PEER))
    assert first.keys == keys(1, 3)
    (second,) = fetches(scene.acquire(4, 3, source=OTHER_PEER))
    assert second.keys == keys(4)


def test_a_block_being_written_here_is_waited_for_and_not_fetched():
    scene = Scene()
    (slot,) = scene.reserve(1)
    assert fetches(scene.acquire(1, wait=True, source=PEER)) == []
    assert len(fetches(scene.do("w", Abandon(slot or 0)))) == 1


@pytest.mark.parametrize("miss", [Miss.NOT_FOUND, Miss.LOST, Miss.LATE, Miss.REFUSED])
def test_a_failed_fetch_ends_its_waiters_with_its_reason(miss: Miss):
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    assert ended(scene.happens(FetchEnded(fetch.fetch, miss)))[0].miss is miss
    assert len(scene.state.readers.fetches) == 0


def test_who_wants_to_wait_asks_again_where_another_did_not_want_to():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    assert scene.acquire(1, source=PEER, wait=True, client="w") == []
    (again,) = fetches(scene.happens(FetchEnded(fetch.fetch, Miss.NOT_FOUND)))
    assert again.wait


def test_who_does_not_want_to_wait_is_not_held_up_by_one_that_does():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, 2, source=PEER, wait=True))
    assert scene.acquire(1, 2, source=PEER, client="w") == []
    scene.arrives(fetch.fetch, 1)
    assert [e.miss for e in ended(scene.happens(FetchStalled(fetch.fetch)))] == [Miss.NOT_FOUND]
    assert ended(scene.acquire(1, 2, source=PEER, client="w"))[0].miss is Miss.NOT_FOUND
    assert len(scene.state.readers.tickets) == 1


def test_who_has_more_time_asks_again_where_another_ran_out_of_it():
    scene = Scene()
    scene.acquire(1, source=PEER, timeout_s=1.0)
    scene.acquire(1, source=PEER, timeout_s=3.0, client="w")
    actions = scene.tick(1.0)
    assert [e.miss for e in ended(actions)] == [Miss.LATE]
    actions = scene.happens(FetchEnded(1, Miss.LATE))
    (again,) = fetches(actions)
    assert again.timeout_s == 2.0
    assert [e.miss for e in ended(scene.happens(FetchEnded(again.fetch, Miss.LATE)))] == [Miss.LATE]


def test_another_source_is_asked_where_the_first_has_failed():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    scene.acquire(1, source=OTHER_PEER, client="w")
    actions = scene.happens(FetchEnded(fetch.fetch, Miss.LOST))
    assert [e.miss for e in ended(actions)] == [Miss.LOST]
    assert [f.peer for f in fetches(actions)] == [OTHER_PEER]


def test_a_corrupt_fetched_block_is_not_stored_and_its_slot_is_free():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    actions = scene.arrives(fetch.fetch, 1, sound=False)
    assert [e.miss for e in ended(actions)] == [Miss.CORRUPT]
    assert scene.state.slots.free == 4
    assert scene.state.corrupt == 1


def test_a_fetched_block_without_room_is_refused():
    scene = Scene()
    scene.put(1, 2, 3, 4)
    scene.acquire(1, 2, 3, 4)
    (fetch,) = fetches(scene.acquire(9, source=PEER))
    assert [e.miss for e in ended(scene.arrives(fetch.fetch, 9))] == [Miss.REFUSED]


def test_a_block_that_was_not_asked_for_is_not_taken():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    assert scene.arrives(fetch.fetch, 7) == []
    assert scene.arrives(fetch.fetch + 1, 1) == []
    assert not scene.has(7)


def test_a_fetched_tail_stays_private():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER, wait=True))
    actions = scene.arrives(fetch.fetch, 1, private=True)
    assert stored(actions) == []
    assert grants(actions)[0].private


@pytest.mark.parametrize("how", ["deadline", "cancel", "goodbye"])
def test_a_fetch_that_nobody_waits_for_any_more_is_called_off(how: str):
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER, timeout_s=1.0))
    match how:
        case "deadline":
            actions = scene.tick(1.0)
        case "cancel":
            actions = scene.do("r", Cancel(scene.ticket))
        case _:
            actions = scene.do("r", Goodbye())
    assert CancelFetch(fetch.fetch, PEER) in actions
    assert not any(isinstance(a, Land) for a in scene.arrives(fetch.fetch, 1))
    assert len(scene.state.readers.fetches) == 0


def test_a_fetch_that_another_still_waits_for_goes_on():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    ticket = scene.ticket
    scene.acquire(1, source=PEER, client="w")
    assert scene.do("r", Cancel(ticket)) == []
    assert len(grants(scene.arrives(fetch.fetch, 1))) == 1


def test_a_release_of_an_unknown_lease_is_nothing():
    assert Scene().do("r", Release((12345,), True)) == []
