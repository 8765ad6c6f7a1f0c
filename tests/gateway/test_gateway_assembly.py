"""The parts together: frames over a real socket into answers over HTTP, start and stop; and the Ray ports on stand-in handles."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio
from gateway_fakes import FAST, MODEL, ByteCodec, FakeCluster, answer_text, reference_text, until
from ray.exceptions import ActorDiedError

from cluster.gateway.gateway import Gateway
from cluster.gateway.ports import PortError
from cluster.gateway.ray_ports import RayPorts
from cluster.gateway.settings import GatewaySettings


def gateway_for(cluster: FakeCluster, **settings: Any) -> Gateway:
    return Gateway(
        gateway_id="gateway-0", settings=GatewaySettings(**(FAST | settings)), model=MODEL, codec=ByteCodec(), ports=cluster,
        answer_text=answer_text,
    )  # fmt: skip


async def test_tokens_travel_from_socket_to_client():
    cluster = FakeCluster(step_s=0.001)
    gateway = gateway_for(cluster)
    url = await gateway.start()
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as worker:
        worker.setsockopt(zmq.LINGER, 0)
        worker.connect(gateway.service.dispatcher.sink.endpoint)
        cluster.deliver = lambda frame: worker.send(frame)
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "seed": 0}
            reply = await client.post("/v1/completions", json=body)
            assert reply.json()["choices"][0]["text"] == reference_text("abc", 20)
            await worker.send(b"junk")
            await until(lambda: b"frames_malformed_total 1.0" in gateway.service.metrics.text())
    await gateway.stop()
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient().get(f"{url}/live")


async def test_taken_port_is_an_error_and_leaves_nothing_open():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        gateway = gateway_for(FakeCluster(), port=other.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await gateway.start()


class Handle:
    """Looks like an actor handle: ``handle.method.remote(...)`` gives something to await."""

    def __init__(self, reply: Any, log: list[Any]) -> None:
        self._reply, self._log = reply, log

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            async def remote(*arguments: object) -> Any:
                self._log.append((method, *arguments))
                if isinstance(self._reply, Exception):
                    raise self._reply
                if self._reply is None:
                    await asyncio.Event().wait()
                return self._reply

        return Method


async def test_ray_ports_look_an_actor_up_again_after_it_died():
    log: list[Any] = []
    handles = [Handle(ActorDiedError(), log), Handle("full", log)]
    looked_up: list[str] = []

    def lookup(name: str, namespace: str) -> Handle:
        looked_up.append(f"{namespace}/{name}")
        return handles[len(looked_up) - 1]

    ports = RayPorts(scheduler="scheduler", namespace="ns", timeout_s=1.0, lookup=lookup)
    with pytest.raises(PortError, match="ActorDied"):
        await ports.submit_decode("decode-0", None)  # type: ignore[arg-type]
    assert await ports.submit_decode("decode-0", None) == "full"  # type: ignore[arg-type]
    await ports.abort("decode-0", "r", 1)
    assert looked_up == ["ns/decode-0"] * 2
    assert log[-1] == ("abort", "r", 1)


async def test_ray_ports_have_deadlines():
    ports = RayPorts(scheduler="s", namespace="ns", timeout_s=0.05, lookup=lambda name, namespace: Handle(None, []))
    with pytest.raises(PortError, match="did not answer"):
        await ports.finished("r", 0)

    def missing(name: str, namespace: str) -> Handle:
        raise ValueError

    with pytest.raises(PortError, match="no actor"):
        await RayPorts(scheduler="s", namespace="ns", timeout_s=1.0, lookup=missing).notices_endpoint()


async def test_ray_ports_ask_scheduler_and_nodes_about_the_pool():
    log: list[Any] = []
    replies = {"scheduler": {"nodes": [{"id": "node-0"}], "workers": []}, "node-0": {"draining": True}}
    ports = RayPorts(
        scheduler="scheduler", namespace="ns", timeout_s=1.0, lookup=lambda name, namespace: Handle(replies[name], log)
    )
    assert await ports.pool_nodes() == [{"id": "node-0"}]
    assert await ports.node_status("node-0") == {"draining": True}
    assert await ports.drain_node("node-0", enable=True) == {"draining": True}
    assert log == [("view",), ("status",), ("drain", True)]


@pytest.mark.parametrize(
    "module", ["cluster.gateway.actor", "scheduler.actor", "kv_pool.actor", "prefill_worker.actor", "decode_worker.actor"]
)
def test_gateway_imports_no_torch(module: str):
    """Neither by itself nor with a handle of an actor: whoever gets one imports the module of the actor's class, and a gateway
    that loads torch amid its first request makes that wait."""
    code = f"import {module}, sys; print(*sorted(m for m in sys.modules if m in ('torch', 'engine.engine')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_every_setting_has_a_default_and_a_sentence():
    assert GatewaySettings().host == "127.0.0.1"
    for name, field in GatewaySettings.model_fields.items():
        assert (field.description or "").endswith("."), name
