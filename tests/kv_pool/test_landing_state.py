"""A block that lands over several turns: what the state does about what happens meanwhile."""

from __future__ import annotations

from kv_pool.node.messages import Cancel, Commit, Miss
from kv_pool.node.stimuli import BlockArrived, BlockLanded, CancelFetch, FetchEnded, Land
from tests.kv_pool.node_scene import BLOCK_TOKENS, OTHER_PEER, PEER, Scene, ended, fetches, grants, key


def begins(scene: Scene, fetch: int, number: int) -> int:
    """A block begins to come in; returns its slot."""
    commit = Commit(-1, key(number), None, BLOCK_TOKENS, 10, 7, b"")
    (land,) = [a for a in scene.happens(BlockArrived(fetch, commit, False)) if isinstance(a, Land)]
    return land.slot


def test_what_is_landing_is_not_visible_and_its_reader_waits():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    slot = begins(scene, fetch.fetch, 1)
    assert not scene.has(1)
    assert scene.state.slots.free == 3
    actions = scene.happens(BlockLanded(slot, True))
    assert [g.key for g in grants(actions)] == [key(1)]
    assert ended(actions)[0].miss is None


def test_a_link_that_breaks_in_the_middle_is_no_corruption():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, 2, source=PEER))
    slot = begins(scene, fetch.fetch, 1)
    assert ended(scene.happens(BlockLanded(slot, False, lost=True))) == []  # the fetch says why
    assert scene.state.slots.free == 4
    assert [e.miss for e in ended(scene.happens(FetchEnded(fetch.fetch, Miss.LOST)))] == [Miss.LOST]
    assert scene.state.corrupt == 0


def test_a_block_given_up_does_not_end_who_asked_anew_meanwhile():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    slot = begins(scene, fetch.fetch, 1)
    assert CancelFetch(fetch.fetch, PEER) in scene.do("r", Cancel(scene.ticket))
    (again,) = fetches(scene.acquire(1, source=PEER))
    assert ended(scene.happens(BlockLanded(slot, False, lost=True))) == []
    assert [g.key for g in grants(scene.arrives(again.fetch, 1))] == [key(1)]


def test_who_waits_for_a_landing_of_another_looks_elsewhere_when_it_is_given_up():
    scene = Scene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    slot = begins(scene, fetch.fetch, 1)
    scene.do("r", Cancel(scene.ticket))
    assert fetches(scene.acquire(1, source=OTHER_PEER, wait=True, client="w")) == []  # it is about to be here
    (elsewhere,) = fetches(scene.happens(BlockLanded(slot, False, lost=True)))
    assert elsewhere.peer == OTHER_PEER


def test_blocks_of_two_peers_land_side_by_side():
    scene = Scene()
    (one,) = fetches(scene.acquire(1, source=PEER))
    (other,) = fetches(scene.acquire(2, source=OTHER_PEER, client="w"))
    slots = begins(scene, one.fetch, 1), begins(scene, other.fetch, 2)
    assert [g.key for g in grants(scene.happens(BlockLanded(slots[1], True)))] == [key(2)]
    assert [g.key for g in grants(scene.happens(BlockLanded(slots[0], True)))] == [key(1)]
