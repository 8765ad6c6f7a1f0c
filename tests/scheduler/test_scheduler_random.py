"""Everything at once: random events against what must always hold."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_scene import BLOCK_TOKENS, Scene, keys_of, small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.plan import Plan, RouteRequest, SchedulerSettings

TTFT_MAX_S = 20.0


def random_report_loads(scene: Scene, draw: random.Random) -> None:
    for worker in scene.workers.values():
        open_there = list(_open(scene, worker.id))
        done = [request for request in open_there if draw.random() < 0.3]
        left = len(open_there) - len(done)
        if isinstance(worker.load, PrefillLoad):
            finished = tuple((*request, 500, 100, 0.5) for request in done)
            worker.load = PrefillLoad(left, 0, left * 500, finished)
        else:
            worker.load = DecodeLoad(0, left, max(0, 100 - 5 * left), 100, 0.02, tuple(done))


def _open(scene: Scene, worker_id: str) -> list[tuple[str, int]]:
    prefill, decode = scene.state.fleet.prefill.get(worker_id), scene.state.fleet.decode.get(worker_id)
    return list(prefill.queue.open) if prefill else list(decode.room.open) if decode else []


def random_step(scene: Scene, draw: random.Random, step: int) -> None:
    worker_id = draw.choice(list(scene.workers))
    match draw.randrange(10):
        case 0:
            scene.silent ^= {worker_id}
        case 1:
            old = scene.workers[worker_id]
            scene.workers[worker_id] = replace(old, incarnation=str(step), fence=0)
        case 2:
            scene.node(draw.choice(list(scene.nodes)), incarnation=str(step))
        case 3:
            scene.failed(worker_id, f"r{draw.randrange(10)}")
        case 4:
            scene.ended(f"r{draw.randrange(10)}", draw.randrange(3))
        case 5 | 6:
            random_report_loads(scene, draw)
            scene.beat(draw.randrange(1, 4))
        case _:
            request = RouteRequest(f"r{draw.randrange(10)}", draw.randrange(3), keys_of("doc", draw.randrange(5)), 400, 100)
            answer = scene.state.route(request, scene.now)
            if isinstance(answer, Plan):
                assert scene.standing(answer.prefill_worker) == scene.standing(answer.decode_worker) == "live"
                assert answer.terms.ttft_s <= TTFT_MAX_S
                assert answer.prefill_source is None or answer.prefill_source.node_id in scene.nodes


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 80))
def test_loads_return_to_zero_whatever_happened(draw: random.Random, steps: int) -> None:
    """Workers and nodes fall silent, restart and come back, ends are lost. Work goes to live workers only, every book agrees with
    the assignments at all times, and at last nothing is left."""
    scene = small_cluster(
        SchedulerSettings(request_life_s=30.0, classes=(f"default=ttft {TTFT_MAX_S:g}s",)), prefill=2, decode=2, nodes=2
    )
    for step in range(steps):
        random_step(scene, draw, step)
        for view in (scene.state.fleet.prefill_view(scene.now, ()), scene.state.fleet.decode_view(scene.now, ())):
            live = {view.ids[row] for row in np.flatnonzero(view.able)}
            standing = {worker_id for worker_id in view.ids if worker_id and scene.standing(worker_id) == "live"}
            assert live <= standing  # less those that are at the end of their ramp, unless there are no others
            assert bool(live) == bool(standing)
        open_requests = {request for worker in scene.workers for request in _open(scene, worker)}
        assert len(open_requests) == len(scene.state.assignments)
    scene.silent.clear()
    for worker in scene.workers.values():
        worker.load = PrefillLoad(1, 0, 10) if isinstance(worker.load, PrefillLoad) else DecodeLoad(1, 0, 100, 100, 0.0)
    scene.beat(70)
    assert len(scene.state.assignments) == 0
    assert all(worker.in_flight == 0 for worker in scene.state.fleet.workers())
    assert all(w.room.blocks >= 0 and w.room._charged == 0 for w in scene.state.fleet.decode.values())
    assert scene.plan("last").prefill_worker in scene.workers


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_equal_events_give_equal_plans(seed: int, steps: int) -> None:
    def run() -> dict[str, object]:
        scene, draw = small_cluster(nodes=2), random.Random(seed)
        for step in range(steps):
            random_step(scene, draw, step)
        return scene.state.view(scene.now)

    assert run() == run()


@pytest.mark.parametrize("size", [1, 16, 64, 256])
def test_the_block_size_is_read_off_the_request(size: int) -> None:
    scene = small_cluster()
    for tokens in {size, size + size // 2, 3 * size - 1, 3 * size, 1000 * size + 1}:
        request = RouteRequest("r", 0, keys_of("doc", tokens // size), tokens, 10)
        need = scene.state._need(request, scene.state._target(request))
        assert need.block_tokens == size
        assert need.tokens - need.reusable_blocks * size >= 1


def test_requests_that_contradict_themselves_do_not_break_it() -> None:
    scene = small_cluster()
    for tokens, keys, new in [(0, 0, 0), (0, 5, 10), (3, 5, -1), (10**9, 1, 10)]:
        scene.state.route(RouteRequest(f"r{tokens}", 0, keys_of("doc", keys), tokens, new), scene.now)
    assert BLOCK_TOKENS == 64
    scene.plan("r")
