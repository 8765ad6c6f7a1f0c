"""Blocks that are promised: they count behind what is there, and stop counting when they are kept, broken or late."""

from __future__ import annotations

import numpy as np
from scheduler_scene import keys_of, small_cluster

from scheduler.plan import SchedulerSettings
from scheduler.promises import GRACE_S, KEYS_MAX, Promises

DOC = keys_of("doc", 6)


def extended(promises: Promises, *blocks: int) -> list[int]:
    return promises.extend(np.array(blocks, np.int64), DOC).tolist()


def test_promised_blocks_follow_on_what_is_there_without_a_hole():
    promises = Promises()
    promises.add(("a", 0), 1, DOC[2:5])
    assert extended(promises, 0, 2, 0) == [0, 5, 0]
    assert extended(promises, 0, 1, 0) == [0, 1, 0]  # a hole between
    assert extended(promises, 0, 3, 0) == [0, 5, 0]
    promises.add(("b", 0), 1, DOC[5:])
    assert extended(promises, 0, 2, 0) == [0, 6, 0]


def test_what_is_pulled_is_promised_too_so_that_a_sibling_follows_it():
    """The prefix lies at one node whose workers may not be used: whoever goes first pulls it, the next goes along."""
    scene = small_cluster(SchedulerSettings(classes=("default=ttft 1h",)), prefill=4, decode=4, nodes=4)
    scene.store("n0", keys_of("doc", 40))
    siblings = [keys_of("doc", 60), keys_of("doc", 60)]
    first, second = (scene.plan(f"r{i}", keys, avoid=("p0",)) for i, keys in enumerate(siblings))
    assert first.prefill_source is not None
    assert (second.prefill_worker, second.prefill_source) == (first.prefill_worker, None)
    assert second.cached_blocks == 60


def test_a_broken_promise_counts_no_more_and_one_of_two_still_does():
    promises = Promises()
    promises.add(("a", 0), 0, DOC)
    promises.add(("b", 0), 0, DOC)
    promises.broken(("a", 0))
    assert extended(promises, 0, 0) == [6, 0]
    promises.broken(("b", 0))
    promises.broken(("b", 0))
    assert extended(promises, 0, 0) == [0, 0]
    assert len(promises) == 0


def test_a_kept_promise_lasts_until_the_event_must_have_come():
    promises = Promises()
    promises.add(("a", 0), 0, DOC)
    promises.computed(("a", 0), now=10.0)
    promises.expire(10.0 + GRACE_S / 2)
    assert extended(promises, 0, 0) == [6, 0]
    promises.broken(("a", 0))  # its end, after the prefill: nothing to break any more
    assert extended(promises, 0, 0) == [6, 0]
    promises.expire(10.0 + GRACE_S)
    assert extended(promises, 0, 0) == [0, 0]


def test_a_node_that_is_gone_takes_its_promises_along():
    promises = Promises()
    promises.add(("a", 0), 0, DOC[:3])
    promises.add(("b", 0), 1, DOC)
    promises.computed(("b", 0), now=0.0)
    promises.forget(1)
    assert extended(promises, 0, 0) == [3, 0]
    promises.expire(100.0)
    promises.forget(0)
    assert len(promises) == 0


def test_what_is_too_much_or_nowhere_is_not_promised():
    promises = Promises()
    promises.add(("a", 0), -1, DOC)
    assert len(promises) == 0
    many = tuple(range(KEYS_MAX + 1))
    promises.add(("b", 0), 0, many)  # type: ignore[arg-type]
    assert len(promises) == 0
