"""The paths for operators: who may use them, and what they say of the pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_fakes import FakeCluster, served
from starlette.datastructures import Headers
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.gateway.openai.errors import ApiError
from cluster.gateway.pool_admin import AdminGate
from cluster.gateway.settings import GatewaySettings
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings, SsdSettings
from tests.kv_pool.pool_world import BLOCK_TOKENS, SLOT_BYTES, chain, connect, put, until


async def test_nodes_are_shown_as_they_say_and_as_the_scheduler_sees_them():
    cluster = FakeCluster(nodes_gone={"node-1"})
    async with served(cluster) as gateway, httpx.AsyncClient() as client:
        nodes = (await client.get(f"{gateway.url}/pool/nodes")).json()["nodes"]
        one = (await client.get(f"{gateway.url}/pool/nodes/node-0")).json()
    scheduler = {"live": True, "draining": False}
    assert nodes == [
        {"id": "node-0", "scheduler": {"id": "node-0"} | scheduler, "status": {"draining": False}, "error": None},
        {"id": "node-1", "scheduler": {"id": "node-1"} | scheduler, "status": None, "error": "node-1.status: ActorDiedError"},
    ]
    assert one == nodes[0]


async def test_a_drain_is_ordered_and_taken_back():
    cluster = FakeCluster()
    async with served(cluster) as gateway, httpx.AsyncClient() as client:
        for enable in (True, True, False):
            reply = await client.post(f"{gateway.url}/pool/nodes/node-1/drain", json={"enable": enable})
            assert (reply.status_code, reply.json()["status"]) == (200, {"draining": enable})
            assert cluster.nodes == {"node-0": {"draining": False}, "node-1": {"draining": enable}}


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"path": "node-9/drain", "json": {"enable": True}}, 404, "node_not_found"),
        ({"path": "scheduler/drain", "json": {"enable": True}}, 404, "node_not_found"),
        ({"path": "node-0/drain", "json": {"enable": 1}}, 400, None),
        ({"path": "node-0/drain", "json": {}}, 400, None),
        ({"path": "node-0/drain", "json": {"enable": True, "more": 1}}, 400, None),
        ({"path": "node-0/drain", "json": {"enable": "x" * 2000}}, 413, "body_too_large"),
        ({"path": "node-0/drain", "content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_json"),
        ({"path": "node-0/drain", "data": {"enable": "true"}}, 415, "unsupported_media_type"),
        ({"path": "node-1/drain", "json": {"enable": True}}, 503, "node_unavailable"),
    ],
)
async def test_orders_that_are_refused(request_: dict[str, Any], status: int, code: str | None):
    cluster = FakeCluster(nodes_gone={"node-1"})
    async with served(cluster) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(f"{gateway.url}/pool/nodes/{request_.pop('path')}", **request_)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert not cluster.nodes["node-0"]["draining"]


async def test_without_a_scheduler_nothing_is_known():
    async with served(FakeCluster(scheduler_gone=True)) as gateway, httpx.AsyncClient() as client:
        reply = await client.get(f"{gateway.url}/pool/nodes")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_scheduler")


async def test_a_user_s_key_is_no_operator_s_and_the_other_way_round():
    keys = {"api_keys": ("user",), "admin_keys": ("admin",)}
    async with served(**keys) as gateway, httpx.AsyncClient() as client:

        async def status(path: str, key: str) -> int:
            return (await client.get(f"{gateway.url}{path}", headers={"authorization": f"Bearer {key}"})).status_code

        assert [await status("/pool/nodes", key) for key in ("admin", "user", "neither")] == [200, 401, 401]
        assert [await status("/v1/models", key) for key in ("admin", "user", "neither")] == [401, 200, 401]
        posted = await client.post(f"{gateway.url}/pool/nodes/node-0/drain", json={"enable": True})
        assert posted.status_code == 401
        assert not gateway.cluster.nodes["node-0"]["draining"]


LOCAL = ("127.0.0.1", 5)


@pytest.mark.parametrize(
    ("settings", "peer", "headers", "status"),
    [
        ({}, LOCAL, {"host": "localhost:8000"}, None),
        ({}, ("::1", 5), {"host": "[::1]:8000"}, None),
        ({}, ("10.0.0.7", 5), {"host": "localhost:8000"}, 403),
        ({}, None, {"host": "localhost:8000"}, 403),
        ({}, LOCAL, {"host": "evil.example:8000"}, 403),  # a name that was bent to 127.0.0.1
        ({}, LOCAL, {"host": "localhost", "origin": "http://evil.example"}, 403),
        ({}, LOCAL, {"host": "localhost", "x-forwarded-for": "10.0.0.7"}, 403),
        ({}, LOCAL, {}, 403),
        ({"api_keys": ("user",)}, LOCAL, {"host": "localhost", "authorization": "Bearer user"}, 403),
        ({"admin_keys": ("a", "b")}, ("10.0.0.7", 5), {"host": "x", "authorization": "bearer b"}, None),
        ({"admin_keys": ("a", "b")}, LOCAL, {"host": "localhost", "authorization": "Basic b"}, 401),
        ({"admin_keys": ("a", "b")}, LOCAL, {"host": "localhost"}, 401),
    ],
)
def test_who_may_look_after_the_pool(settings: dict[str, Any], peer: Any, headers: dict[str, str], status: int | None):
    gate = AdminGate(GatewaySettings(**settings))
    if status is None:
        gate.check({"client": peer}, Headers(headers))
        return
    with pytest.raises(ApiError) as refused:
        gate.check({"client": peer}, Headers(headers))
    assert refused.value.status == status


# --- the command, the gateway and a real node together ----------------------------------------------------------------------


class RealNode(FakeCluster):
    """A cluster whose one node is real, and whose scheduler knows at once what the node says."""

    def __init__(self, node: PoolNode) -> None:
        super().__init__()
        self.node = node

    async def pool_nodes(self) -> list[dict[str, Any]]:
        return [{"id": self.node.node_id, "live": True, "draining": self.node.draining}]

    async def node_status(self, node_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(self.node.status)

    async def drain_node(self, node_id: str, *, enable: bool) -> dict[str, Any]:
        self.node.drain(enable=enable)
        return await self.node_status(node_id)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[PoolNode]:
    settings = PoolSettings(dram=str(16 * SLOT_BYTES))
    ssd = SsdSettings(directory=str(tmp_path / "{node}"), capacity="16MiB", segment="1MiB", batch="512KiB", dwpd=1000.0)
    node = PoolNode(node_id="node-0", slot_bytes=SLOT_BYTES, settings=settings, ssd=ssd, block_tokens=BLOCK_TOKENS)
    node.start()
    yield node
    node.stop()


async def test_a_node_with_an_ssd_is_looked_at_drained_and_checked(
    node: PoolNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("MOONPOOL_")]:
        monkeypatch.delenv(name)
    runner = CliRunner(env={"COLUMNS": "220", "NO_COLOR": "1", "TERM": "dumb"})

    def fill() -> None:
        until(lambda: node.status()["ssd"]["log"]["up"])
        client = connect(node.local_endpoint)
        put(client, chain(5))
        until(lambda: node.stats()["slots_committed"] == 5, clients=(client,))
        client.close()

    await asyncio.to_thread(fill)
    async with served(RealNode(node)) as gateway:

        async def moonpool(*arguments: str) -> tuple[int, str]:
            result = await asyncio.to_thread(runner.invoke, app, ["pool", *arguments])
            return result.exit_code, result.output

        status, text = await moonpool("inspect", "--url", gateway.url)
        rows = [line.split() for line in text.splitlines() if "node-0" in line]
        assert status == 0, text
        assert rows[0][1:8] == ["in", "use", "16", "11", "0", "5", "0"]
        assert rows[1][1:6] == ["up", "16", "0", "0", "0"]
        assert (await moonpool("verify", str(tmp_path / "node-0")))[0] == 2, "in use"
        status, text = await moonpool("drain", "node-0", "--timeout", "20", "--url", gateway.url)
        assert (status, text.splitlines()[-1]) == (0, "node-0: empty")
        assert "drained, empty" in (await moonpool("inspect", "--url", gateway.url))[1]
    node.stop()
    status, text = await moonpool("verify", str(tmp_path / "node-0"))
    assert status == 0, text
    assert ": 5 records good, 0 bad," in text
