"""Scheduler and pool node as they really are, over their sockets: a committed block is a cached prefix in the next plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from scheduler_scene import keys_of

from decode_worker.task import DecodeLoad
from kv_pool.client import Granted, PoolClient, Reserved
from kv_pool.events.snapshot import fetch_snapshot
from kv_pool.heartbeat import HeartbeatSender
from kv_pool.keys import BlockKey
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings
from prefill_worker.task import PrefillLoad
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.service import SchedulerService

SLOT_BYTES = 4096
PERIOD_S = 0.05
DEADLINE_S = 10.0


def until(condition: Callable[[], Any], what: str, *, within_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        threading.Event().wait(0.01)
    raise AssertionError(f"not in {within_s} s: {what}")


def beats(service: SchedulerService, payload: Callable[[], dict[str, Any]]) -> HeartbeatSender:
    sender = HeartbeatSender(
        resolve=lambda: service.reports_endpoint, payload=payload, on_reply=lambda _: None, period_s=PERIOD_S
    )
    sender.start()
    return sender


def member(role: str, name: str, load: dict[str, Any], incarnation: str = "a") -> dict[str, Any]:
    return {
        "v": 1, "role": role, "id": name, "incarnation": incarnation, "actor": name, "node_id": "node-0", "fence": 0,
        "load": load,
    }  # fmt: skip


def node_payload(node: PoolNode) -> dict[str, Any]:
    load = {
        "endpoint": node.endpoint, "events": node.events_endpoint,
        "local": node.local_endpoint, "slots_total": 16, "slots_free": 16, "slot_bytes": SLOT_BYTES,
    }  # fmt: skip
    return member("node", "node-0", load, node.incarnation)


def store(node: PoolNode, keys: tuple[BlockKey, ...]) -> None:
    """Put blocks as a worker would."""
    client = PoolClient(node.local_endpoint, client_id="worker", block_bytes=SLOT_BYTES)
    client.connect(5.0)
    try:
        ticket = client.reserve(keys, timeout_s=5.0)
        reserved = until(lambda: next((e for e in client.poll(0.05) if isinstance(e, Reserved)), None), "slots")
        assert reserved.ticket == ticket
        for slot, parent in zip(reserved.slots, (None, *keys), strict=False):
            assert slot is not None
            client.commit(slot, tokens=64, parent=parent)
        client.acquire(keys[-1:], wait=False, timeout_s=5.0)
        granted = until(lambda: next((e for e in client.poll(0.05) if isinstance(e, Granted)), None), "the last block")
        client.release([granted.blocks[0].lease])
    finally:
        client.close()


def test_committed_blocks_are_in_the_next_plan_and_gone_with_their_node() -> None:
    keys = keys_of("doc", 4)
    settings = PoolSettings(dram=str(16 * SLOT_BYTES))
    service = SchedulerService(SchedulerSettings(heartbeat_s=PERIOD_S), fetch=fetch_snapshot)
    service.start()
    nodes = [PoolNode(node_id="node-0", slot_bytes=SLOT_BYTES, settings=settings) for _ in range(2)]
    nodes[0].start()
    senders = [
        beats(service, lambda: node_payload(nodes[0])),
        beats(service, lambda: member("prefill", "prefill-0", PrefillLoad(0, 0, 0).to_wire())),
        beats(service, lambda: member("decode", "decode-0", DecodeLoad(0, 0, 100, 100, 0.0).to_wire())),
    ]

    def cached(request_id: str) -> int:
        answer = service.route(RouteRequest(request_id, 0, keys, 4 * 64 + 5, 10))
        service.finished(request_id, 0)
        return answer.cached_blocks if isinstance(answer, Plan) else -1

    try:
        until(lambda: cached("cold") == 0, "a plan")
        store(nodes[0], keys)
        until(lambda: cached("warm") == 4, "a plan with the cached prefix")
        senders[0].stop()
        nodes[0].stop()
        nodes[1].start()
        senders.append(beats(service, lambda: node_payload(nodes[1])))
        until(lambda: cached("restarted") == 0, "a plan without it")
        store(nodes[1], keys[:2])
        until(lambda: cached("again") == 2, "a plan with what the new node has")
    finally:
        for sender in senders:
            sender.stop()
        service.stop()
        for node in nodes:
            node.stop()
