"""What the pool's rows measure is what they say: blocks that come back as they were put, faults that are seen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.index_child import CHAIN, longest_prefixes, node_table, scheduler_index, ssd_index
from benchmarks.pool_child import Child
from benchmarks.ssd_speed import SsdOwner, chains

PAGE = 4096


def test_a_worker_answers_about_all_pieces():
    child = Child()
    try:
        assert child.handle({"do": "open", "block": 1 << 16, "blocks": 32}) == {}
        for checked in (True, False):
            for batch in (1, 16):
                assert child.handle({"do": "put", "batch": batch, "checked": checked})["seconds"] > 0
                assert child.handle({"do": "get", "batch": batch, "checked": checked})["seconds"] > 0
        assert all(seconds > 0 for seconds in child.handle({"do": "memcpy"}).values())
        assert len(child.handle({"do": "acquire", "chain": 32, "times": 3})["microseconds"]) == 3
        with pytest.raises(ValueError, match="no such question"):
            child.handle({"do": "nothing"})
    finally:
        child.close()


def test_the_tier_alone_writes_reads_and_finds_everything_again(tmp_path: Path):
    sizes: dict[str, Any] = {"segments": 6, "segment_bytes": 64 * PAGE, "slot_bytes": 4 * PAGE, "slots": 16}
    with SsdOwner(tmp_path, **sizes) as owner:
        keys = []
        for chain in chains(1, 24, 4):
            owner.write_chain(chain)
            keys += chain
        owner.finish()
        owner.read_all(keys, 4)
        assert owner.bytes_read == 24 * 4 * PAGE
        counted = owner.disk.stats()["ssd_bytes_written"]
        assert counted >= 24 * 5 * PAGE
    with SsdOwner(tmp_path, **sizes) as owner:
        assert owner.recovered == 24
        owner.read_all(keys, 4)


def test_chains_differ_by_series_and_have_the_length_asked_for():
    first, second = list(chains(1, 10, 4)), list(chains(2, 10, 4))
    assert [len(chain) for chain in first] == [4, 4, 2]
    assert not {key for chain in first for key in chain} & {key for chain in second for key in chain}
    assert first == list(chains(1, 10, 4))


def test_indexes_hold_what_they_are_given():
    blocks = 4 * CHAIN
    index = scheduler_index(blocks)
    assert index.entries == blocks
    assert len(longest_prefixes(index, CHAIN, 5, 1)) == 5
    assert len(ssd_index(blocks)) == blocks
    assert len(node_table(blocks).blocks) == blocks


def test_soak_sees_memory_that_grows_and_passes_what_does_not():
    flat = [(float(i), 100 * soak.MIB) for i in range(100)]
    rising = [(float(i), (100 + i) * soak.MIB) for i in range(100)]
    warm_up = [(float(i), (50 if i < 20 else 100) * soak.MIB) for i in range(100)]
    assert not soak.memory_faults(*soak.growth(flat, 100.0))
    assert not soak.memory_faults(*soak.growth(warm_up, 100.0))
    assert soak.memory_faults(*soak.growth(rising, 100.0))


def quiet(**changes: int) -> dict[str, int]:
    return dict.fromkeys(soak.HELD, 0) | {"slots_free": 6, "slots_committed": 4, "slots_total": 10} | changes


@pytest.mark.parametrize("name", soak.HELD)
def test_soak_sees_what_was_left_behind(name: str):
    assert not soak.leak_faults(quiet())
    assert name in soak.leak_faults(quiet(**{name: 1}))[0]


def test_soak_sees_a_slot_that_is_nowhere():
    assert "add up" in soak.leak_faults(quiet(slots_free=5))[0]


WRITTEN = 1 << 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"log": WRITTEN + 4096}, None),
        ({"log": WRITTEN - 4096}, "the log"),
        ({"kernel": WRITTEN - 1}, "the kernel"),
        ({"kernel": WRITTEN + (64 << 20)}, "the kernel"),
        ({"live": 1 << 40}, "in use"),
        ({"capacity": 4096, "live": 1, "dead": 1}, "files take"),
    ],
)
def test_soak_sees_counters_that_do_not_add_up(tmp_path: Path, changes: dict[str, int], said: str | None):
    numbers = {"disk": WRITTEN, "log": WRITTEN, "kernel": WRITTEN, "live": 5, "dead": 5, "capacity": 8 << 20} | changes
    (tmp_path / "segment").write_bytes(bytes(2 << 20))
    log = {"bytes_written": numbers["log"], "live_bytes": numbers["live"], "dead_bytes": numbers["dead"]}
    ssd = {"disk": {"ssd_bytes_written": numbers["disk"]}, "log": log}
    faults = soak.disk_faults(ssd, numbers["kernel"], tmp_path, numbers["capacity"])
    assert [said in fault for fault in faults] == ([] if said is None else [True])


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path: Path):
    started = time.monotonic()
    assert soak.soak(20.0, 64 * soak.MIB, tmp_path) == []
    assert time.monotonic() - started >= 20.0
