"""The places of open requests in the columns that routing reads: as many as are needed, and not for ever as many as once were."""

from __future__ import annotations

import pytest
from scheduler_scene import Scene, keys_of, small_cluster

from scheduler.columns import PLACES_FIRST
from scheduler.plan import SchedulerSettings


def places(scene: Scene) -> int:
    return scene.state.fleet.prefill_view(scene.now, ()).work.precedence.shape[1]


def waits(scene: Scene) -> list[float]:
    view = scene.state.fleet.prefill_view(scene.now, ())
    return [float(row[row < float("inf")].size) for row in view.work.precedence]


@pytest.mark.parametrize("last_first", [False, True])
def test_a_rush_takes_room_and_gives_it_back(last_first: bool):
    scene = small_cluster(SchedulerSettings(classes=("default=ttft 10h",)), prefill=2, decode=8)
    names = [f"r{i}" for i in range(100)]
    for name in names:
        scene.plan(name, keys_of(name, 1), max_new_tokens=1)
    assert sum(waits(scene)) == 100
    assert places(scene) >= max(waits(scene))
    for left, name in zip(range(99, -1, -1), names[:: -1 if last_first else 1], strict=True):
        scene.ended(name)
        assert sum(waits(scene)) == left
    assert places(scene) == PLACES_FIRST
    scene.plan("again", keys_of("again", 1), max_new_tokens=1)
    assert sum(waits(scene)) == 1
