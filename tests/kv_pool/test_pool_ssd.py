"""A node with an SSD: what DRAM has no room for comes back from the disk, also after the node was killed, and never wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_pool.client import Miss, PoolClient, Tier
from kv_pool.events.snapshot import fetch_snapshot
from kv_pool.keys import BlockKey
from tests.kv_pool.pool_world import BLOCK_TOKENS, SLOT_BYTES, NodeProcess, chain, content, get, put, reserve, until

SLOTS = 16
RECORDS = 3 * SLOTS
StartNode = Callable[..., NodeProcess]


def ssd_settings(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "directory": str(directory), "capacity": "32MiB", "segment": "1MiB", "batch": "512KiB", "dwpd": 1000.0, "free_target": 0.2,
    } | changes  # fmt: skip


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    nodes: list[NodeProcess] = []

    def start(name: str = "node-a", folder: str = "ssd", ssd: dict[str, Any] | None = None, **settings: Any) -> NodeProcess:
        settings = {"dram": str(SLOTS * SLOT_BYTES)} | settings
        nodes.append(NodeProcess(name, ssd=ssd_settings(tmp_path / folder, **(ssd or {})), **settings))
        until(lambda: nodes[-1].status()["ssd"]["log"]["up"])
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def fill(client: PoolClient, keys: list[BlockKey]) -> None:
    """One chain, block by block, as a worker writes it."""
    parent: BlockKey | None = None
    for k in keys:
        client.reserve([k], timeout_s=5.0, parent=parent)
        (slot,) = reserved(client)
        assert slot is not None
        slot.buffer[:] = content(k)
        client.commit(slot, tokens=BLOCK_TOKENS, parent=parent)
        parent = k


def reserved(client: PoolClient) -> Any:
    from kv_pool.client import Reserved, ReserveRefused
    from tests.kv_pool.pool_world import wait_for

    last = wait_for(client, Reserved, ReserveRefused)[-1]
    assert isinstance(last, Reserved), last
    return last.slots


def read(client: PoolClient, keys: list[BlockKey], **options: Any) -> tuple[list[Tier], Miss | None]:
    """Acquire, check and release; the tiers that the blocks came from."""
    blocks, end = get(client, keys, **options)
    for block in blocks:
        assert block.verify()
        assert bytes(block.buffer) == content(block.key)
    client.release([block.lease for block in blocks]) if blocks else None
    assert [block.key for block in blocks] == keys[: len(blocks)]
    return [block.tier for block in blocks], end.miss


def chains(count: int, length: int = 4) -> list[list[BlockKey]]:
    return [chain(length, first=1 + 100 * i) for i in range(count)]


def put_all(node: NodeProcess, client: PoolClient, wanted: list[list[BlockKey]]) -> None:
    """Write chains one after the other, none so fast that the SSD cannot follow."""
    for keys in wanted:
        put(client, keys)
        until(lambda: node.stats()["slots_free"] >= 2, clients=(client,))


def test_what_dram_has_no_room_for_comes_back_from_the_ssd(start_node: StartNode):
    node = start_node()
    client = node.client()
    wanted = chains(RECORDS // 4)
    put_all(node, client, wanted)
    tiers = [read(client, keys) for keys in reversed(wanted)]
    assert all(miss is None for _, miss in tiers)
    assert {tier for found, _ in tiers for tier in found} == {Tier.DRAM, Tier.SSD}
    assert node.stats()["ssd_blocks_read"] >= RECORDS - SLOTS
    snapshot = fetch_snapshot(node.endpoint, 5.0)
    everywhere = {k for keys in snapshot.keys_by_medium.values() for k in keys}
    assert {k for keys in wanted for k in keys} <= everywhere
    client.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_is_on_the_ssd_survives_the_node(start_node: StartNode, how: str):
    node = start_node(ssd={"dwpd": 4.0})
    client = node.client()
    wanted = chains(RECORDS // 4)
    put_all(node, client, wanted)
    written = set(fetch_snapshot(node.endpoint, 5.0).keys_by_medium["ssd"])
    assert len(written) >= RECORDS - SLOTS
    spent = node.status()["ssd"]["log"]["budget_spent"]
    if how == "killed":
        node.signal(signal.SIGKILL)
    else:
        node.pipe.close()  # which has it end in good order
    node.process.join(10)
    node.close()
    again = start_node()
    other = again.client()
    found = set(fetch_snapshot(again.endpoint, 5.0).keys_by_medium["ssd"])
    assert written <= found
    for keys in wanted:
        tiers, _ = read(other, keys)
        assert len(tiers) >= sum(k in written for k in keys)
    forgiven = 0 if how == "stopped" else 2**20 + 2**19  # a batch more than what may be unrecorded
    assert again.status()["ssd"]["log"]["budget_spent"] >= spent - forgiven
    other.close()


def test_two_acquires_of_one_block_on_the_ssd_cause_one_read(start_node: StartNode):
    node = start_node()
    client = node.client()
    wanted = chains(RECORDS // 4)
    put_all(node, client, wanted)
    others = [node.client(f"reader-{i}") for i in range(3)]
    before = node.stats()["ssd_blocks_read"]
    for other in others:
        other.acquire(wanted[0], wait=False, timeout_s=5.0)
    from kv_pool.client import AcquireEnded
    from tests.kv_pool.pool_world import wait_for

    for other in others:
        end = wait_for(other, AcquireEnded)[-1]
        assert isinstance(end, AcquireEnded)
        assert end.available == 4
    assert node.stats()["ssd_blocks_read"] - before == 4
    for other in others:
        other.close()


def test_another_node_gets_what_lies_on_the_ssd(start_node: StartNode):
    far, near = start_node("node-far", "far"), start_node("node-near", "near")
    writer, reader = far.client(), near.client()
    wanted = chains(RECORDS // 4)
    put_all(far, writer, wanted)
    tiers, miss = read(reader, wanted[0], source=far.source)
    assert (tiers, miss) == ([Tier.REMOTE_SSD] * 4, None)
    assert read(reader, wanted[0])[0] == [Tier.DRAM] * 4
    put(writer, chain(1, first=9000))
    assert read(reader, chain(1, first=9000), source=far.source)[0] == [Tier.REMOTE_DRAM]


def test_at_the_cap_blocks_leave_dram_without_waiting_and_nothing_more_is_written(start_node: StartNode):
    node = start_node(ssd={"dwpd": 0.02})  # 640 KiB a day: about nine blocks
    client = node.client()
    for keys in chains(RECORDS // 4):
        put(client, keys)
    log = node.status()["ssd"]["log"]
    assert log["budget_spent"] <= log["budget_bytes"]
    assert node.stats()["evictions"] >= RECORDS - SLOTS
    written = log["bytes_written"]
    for keys in chains(RECORDS // 4):
        put(client, [BlockKey(bytes((7, *k[1:]))) for k in keys])
    assert node.status()["ssd"]["log"]["bytes_written"] <= written + 4096


def test_a_directory_that_is_gone_costs_the_tier_and_nothing_else(start_node: StartNode, tmp_path: Path):
    node = start_node(ssd={"retry_s": 0.1})
    client = node.client()
    put_all(node, client, chains(RECORDS // 4))
    (tmp_path / "ssd").rename(tmp_path / "away")
    until(lambda: not node.status()["ssd"]["disk"]["healthy"], within_s=20, clients=(client,))
    put(client, chain(4, first=9000))
    assert read(client, chain(4, first=9000)) == ([Tier.DRAM] * 4, None)
    assert read(client, chains(1)[0])[1] is Miss.NOT_FOUND
    assert fetch_snapshot(node.endpoint, 5.0).keys_by_medium["ssd"] == ()
    (tmp_path / "away").rename(tmp_path / "ssd")
    until(lambda: node.status()["ssd"]["log"]["up"], within_s=20, clients=(client,))
    assert read(client, chains(1)[0]) == ([Tier.SSD] * 4, None)


def test_a_damaged_record_is_a_typed_miss_and_its_neighbours_are_not(start_node: StartNode, tmp_path: Path):
    node = start_node()
    client = node.client()
    wanted = chains(RECORDS // 4)
    put_all(node, client, wanted)
    victim = wanted[0][2]
    for segment in (tmp_path / "ssd").glob("segment-*"):
        raw = segment.read_bytes()
        at = raw.find(content(victim))
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at + SLOT_BYTES // 2)
                file.write(b"\x00wrong\x00")
    tiers, miss = read(client, wanted[0])
    assert (len(tiers), miss) == (2, Miss.CORRUPT)
    assert read(client, wanted[0])[1] is Miss.NOT_FOUND
    assert read(client, wanted[1]) == ([Tier.SSD] * 4, None)
    assert node.stats()["corrupt"] == 1


def test_an_unknown_retention_class_is_refused_by_name(start_node: StartNode):
    client = start_node().client()
    client.reserve(chain(1), timeout_s=1.0, retention="for ever")
    from kv_pool.client import ReserveRefused
    from tests.kv_pool.pool_world import wait_for

    refused = wait_for(client, ReserveRefused)[-1]
    assert isinstance(refused, ReserveRefused)
    assert "retention" in refused.reason
    assert "chat" in refused.reason


def test_a_drained_node_writes_what_it_has_takes_nothing_and_is_empty(start_node: StartNode):
    node = start_node()
    client = node.client()
    wanted = chains(3)
    put_all(node, client, wanted)
    node.drain(enable=True)
    until(lambda: node.status()["empty"], clients=(client,))
    client.reserve(chain(1, first=777), timeout_s=1.0)
    from kv_pool.client import ReserveRefused
    from tests.kv_pool.pool_world import wait_for

    assert isinstance(wait_for(client, ReserveRefused)[-1], ReserveRefused)
    node.drain(enable=False)
    assert [read(client, keys) for keys in wanted] == [([Tier.SSD] * 4, None)] * 3
    assert reserve(client, chain(1, first=777)) != (None,)
