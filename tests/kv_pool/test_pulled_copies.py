"""A block that another node has pulled goes first where DRAM is short: the nodes together hold more that way."""

from __future__ import annotations

import pytest
from node_scene import LIMITS, Scene

from kv_pool.node.messages import Release


def pulled(scene: Scene, number: int) -> None:
    """Another node takes a copy, and says that it has it."""
    scene.pull(number)
    leases = sorted(scene.state.clients["far"].leases)
    scene.do("far", Release(tuple(leases), consume=False))


def stays_after_one_more(scene: Scene, number: int) -> set[int]:
    """Blocks that are there once a new one needed room."""
    scene.put(number)
    return {each for each in range(1, number + 1) if scene.has(each)}


@pytest.mark.parametrize(("what", "left"), [("goes_first", {1, 3, 4, 5}), ("stays", {2, 3, 4, 5})])
def test_a_pulled_copy_goes_before_an_older_block_that_is_nowhere_else(what: str, left: set[int]):
    scene = Scene(slots=4, limits=LIMITS.model_copy(update={"pulled_copy": what}))
    for number in (1, 2, 3, 4):
        scene.now += 1.0
        scene.put(number)
    pulled(scene, 2)
    assert stays_after_one_more(scene, 5) == left
    scene.state.check()


def test_a_use_here_makes_it_as_young_as_any():
    scene = Scene(slots=4, limits=LIMITS.model_copy(update={"pulled_copy": "goes_first"}))
    for number in (1, 2, 3, 4):
        scene.now += 1.0
        scene.put(number)
    pulled(scene, 2)
    scene.now += 1.0
    scene.release(scene.lease(2))
    assert stays_after_one_more(scene, 5) == {2, 3, 4, 5}


def test_a_pull_that_was_given_up_changes_nothing():
    scene = Scene(slots=4, limits=LIMITS.model_copy(update={"pulled_copy": "goes_first"}))
    for number in (1, 2, 3, 4):
        scene.now += 1.0
        scene.put(number)
    scene.pull(2)
    from kv_pool.node.stimuli import ClientGone

    scene.happens(ClientGone("far"))
    assert stays_after_one_more(scene, 5) == {2, 3, 4, 5}
