"""A node that demands keys, and a scheduler that has them: its events and its snapshots are heard, by nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from scheduler_scene import keys_of
from test_with_pool_node import PERIOD_S, SLOT_BYTES, beats, member, node_payload, until

from decode_worker.task import DecodeLoad
from kv_pool.events.snapshot import Snapshot, fetch_snapshot
from kv_pool.events.types import BlockStored
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings
from kv_pool.transport.curve import CurveKeys, make_pair
from prefill_worker.task import PrefillLoad
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.service import SchedulerService
from scheduler.snapshot_thread import SnapshotFetcher

DOC = keys_of("doc", 4)


@pytest.fixture
def settings(tmp_path: Path) -> PoolSettings:
    _, secret = make_pair(tmp_path)
    return PoolSettings(dram=str(16 * SLOT_BYTES), curve_secret_key_file=str(secret))


@contextmanager
def scheduler(node: PoolNode, fetch: SnapshotFetcher, keys: CurveKeys | None) -> Iterator[Callable[[str], int]]:
    """Yields a function that says how much of the document a plan finds."""
    service = SchedulerService(SchedulerSettings(heartbeat_s=PERIOD_S), fetch=fetch, keys=keys)
    service.start()
    with ExitStack() as stack:
        stack.callback(service.stop)
        for payload in (
            lambda: node_payload(node),
            lambda: member("prefill", "prefill-0", PrefillLoad(0, 0, 0).to_wire()),
            lambda: member("decode", "decode-0", DecodeLoad(0, 0, 100, 100, 0.0).to_wire()),
        ):
            stack.callback(beats(service, payload).stop)

        def cached(request_id: str) -> int:
            answer = service.route(RouteRequest(request_id, 0, DOC, 4 * 64 + 5, 10))
            service.finished(request_id, 0)
            return answer.cached_blocks if isinstance(answer, Plan) else -1

        yield cached


@pytest.mark.parametrize("keyed", [True, False])
def test_events_are_followed_with_keys_and_only_then(settings: PoolSettings, keyed: bool) -> None:
    node = PoolNode(node_id="node-0", slot_bytes=SLOT_BYTES, settings=settings)  # not started: its events are ours to send
    keys = CurveKeys.load(settings.curve) if keyed else None

    def empty(*_: object) -> Snapshot:
        return Snapshot("node-0", node.incarnation, node._events.sequence, {"dram": ()})

    try:
        with scheduler(node, empty, keys) as cached:
            until(lambda: cached("cold") == 0, "a plan")

            def heard() -> bool:
                """Said again and again: who is not connected yet, hears the next one."""
                for position, key in enumerate(DOC):
                    node._events.add(BlockStored((key,), DOC[position - 1] if position else None, 64, "dram"))
                node._events.flush()
                return cached("warm") == 4

            if keyed:
                until(heard, "a plan with what the events told")
            else:
                with pytest.raises(AssertionError):
                    until(heard, "a plan with what it must not hear", within_s=0.5)
    finally:
        node.stop()


def test_a_snapshot_is_taken_with_keys(settings: PoolSettings) -> None:
    node = PoolNode(node_id="node-0", slot_bytes=SLOT_BYTES, settings=settings)
    node.start()
    taken: list[Snapshot] = []

    def fetch(endpoint: str, timeout_s: float) -> Snapshot:
        taken.append(fetch_with_keys(endpoint, timeout_s))
        return taken[-1]

    keys = CurveKeys.load(settings.curve)
    fetch_with_keys = partial(fetch_snapshot, keys=keys)
    try:
        with scheduler(node, fetch, keys) as cached:
            until(lambda: cached("cold") == 0, "a plan")
            until(lambda: taken, "a snapshot")
        assert taken[0].incarnation == node.incarnation
    finally:
        node.stop()
