"""The peers of the pool's rows: when they are skipped and why, and how their figures are read."""

from __future__ import annotations

import ctypes
import importlib.util
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import mooncake_rates
from benchmarks.harness import SkipBenchmark
from benchmarks.peers import fio
from benchmarks.pool_pieces import BATCH, MIB, SIZES_MIB, blocks_of, gigabytes_per_s
from benchmarks.rounds import rank, rounds_of


def report(verb: str = "write", *, size: int = 1 << 30, milliseconds: int = 500, error: int = 0) -> dict[str, Any]:
    return {"jobs": [{"error": error, verb: {"io_bytes": size, "runtime": milliseconds}}]}


def test_fio_report_is_read():
    assert fio.rate(report(), "write", 1 << 30) == pytest.approx((1 << 30) / 0.5 / 1e9)


@pytest.mark.parametrize(
    "wrong", [report(error=28), report(size=1 << 20), report(milliseconds=0)], ids=["error", "too few bytes", "no time"]
)
def test_fio_that_did_something_else_is_no_figure(wrong: dict[str, Any]):
    with pytest.raises(RuntimeError, match="fio"):
        fio.rate(wrong, "write", 1 << 30)


def test_fio_is_told_to_go_around_the_page_cache(tmp_path: Path):
    said = fio.command("fio", tmp_path, "read", MIB, 8 * MIB)
    assert {"--rw=read", "--direct=1", "--ioengine=libaio", "--iodepth=4", f"--bs={MIB}", f"--size={8 * MIB}"} < set(said)
    assert f"--filename={tmp_path / fio.FILE}" in said


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_fio_its_rows_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SkipBenchmark, match="fio is not installed"):
        fio.executable()


def test_a_file_system_that_refuses_direct_writes_is_a_skip_and_another_failure_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "fio", "echo 'fio: open: Invalid argument' >&2; exit 1")
    with pytest.raises(SkipBenchmark, match="direct"):
        fio.gigabytes_per_s(tmp_path, "write", MIB, MIB)
    program(tmp_path / "bin", "fio", "echo 'No space left on device' >&2; exit 1")
    with pytest.raises(RuntimeError, match="No space left"):
        fio.gigabytes_per_s(tmp_path, "write", MIB, MIB)


def test_what_fio_says_before_its_report_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    told = f'{{"jobs": [{{"error": 0, "write": {{"io_bytes": {MIB}, "runtime": 1}}}}]}}'
    program(tmp_path / "bin", "fio", f"echo 'note: laying out'; echo '{told}'")
    assert fio.gigabytes_per_s(tmp_path, "write", MIB, MIB) == pytest.approx(MIB / 1e6)


def test_mooncake_is_skipped_with_the_reason_until_its_environment_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(mooncake_rates.VARIABLE, raising=False)
    with pytest.raises(SkipBenchmark, match=mooncake_rates.VARIABLE):
        mooncake_rates.peer_python()
    monkeypatch.setenv(mooncake_rates.VARIABLE, str(tmp_path))
    with pytest.raises(SkipBenchmark, match="there is no"):
        mooncake_rates.peer_python()
    program(tmp_path / "bin", "python", "")
    with pytest.raises(SkipBenchmark, match="not installed"):
        mooncake_rates.peer_python()
    program(tmp_path / "bin", "mooncake_master", "")
    assert mooncake_rates.peer_python() == tmp_path / "bin" / "python"


@pytest.fixture
def peer() -> ModuleType:
    """The peer's script, which imports nothing that its environment alone has."""
    spec = importlib.util.spec_from_file_location("mooncake_store_script", mooncake_rates.PEER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Store:
    """A Mooncake Store in a dictionary. ``wrong`` changes what it returns."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.wrong: Any = None

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            assert key not in self.objects
            self.objects[key] = ctypes.string_at(address, size)
        return [0] * len(keys)

    def put_from(self, key: str, address: int, size: int) -> int:
        return self.batch_put_from([key], [address], [size])[0]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            data = self.objects[key]
            if self.wrong == "bytes":
                data = data[:-1] + b"?"
            ctypes.memmove(address, data, size)
        return [-1 if self.wrong == "code" else size for size in sizes]

    def get_into(self, key: str, address: int, size: int) -> int:
        return self.batch_get_into([key], [address], [size])[0]

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)

    def batch_remove(self, keys: list[str], _force: bool) -> list[int]:
        for key in keys:
            del self.objects[key]
        return [0] * len(keys)


@pytest.fixture
def store_and_client(peer: ModuleType):
    block = peer.PATTERN_BYTES
    memory = ctypes.create_string_buffer(peer.RING * block)
    store = Store()
    client = peer.Client(store, ctypes.addressof(memory), block)
    yield store, client, block
    del memory


@pytest.mark.parametrize("batch", [1, 16])
def test_the_peer_puts_new_keys_and_gets_them_back(store_and_client: Any, batch: int):
    store, client, block = store_and_client
    ask = {"block": block, "blocks": 32, "batch": batch}
    for _ in range(2):
        assert client.handle({"do": "put"} | ask)["seconds"] > 0
        assert len(store.objects) == 32, "what was put before is removed"
        assert client.handle({"do": "get"} | ask)["seconds"] > 0
    assert len(client.handle({"do": "is_exist", "times": 3})["microseconds"]) == 3


@pytest.mark.parametrize(("wrong", "said"), [("bytes", "other bytes"), ("code", "get returned")])
def test_a_store_that_returns_something_else_is_no_figure(store_and_client: Any, wrong: str, said: str):
    store, client, block = store_and_client
    ask = {"block": block, "blocks": 16, "batch": 16}
    client.handle({"do": "put"} | ask)
    store.wrong = wrong
    with pytest.raises(RuntimeError, match=said):
        client.handle({"do": "get"} | ask)


def test_the_peer_takes_a_port_that_nobody_has(peer: ModuleType):
    first = peer.free_port()
    assert first not in range(10002, 20000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert peer.free_port() != first


def test_a_series_is_whole_batches_of_one_size_in_all():
    for size in SIZES_MIB:
        assert blocks_of(size) % BATCH == 0
        assert gigabytes_per_s(size, 1.0) == pytest.approx(blocks_of(size) * size * MIB / 1e9)


def test_the_first_round_warms_up_and_is_not_counted():
    numbers = iter(range(100))
    figures = rounds_of(5, lambda: {"a": float(next(numbers)), "b": 2.0})
    assert figures["a"].values == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert figures["b"].median == 2.0
    assert next(numbers) == 6


def test_rank_is_in_the_values():
    values = [float(i) for i in range(100)]
    assert (rank(values, 0.5), rank(values, 0.99), rank(values, 1.0), rank([7.0], 0.99)) == (50.0, 99.0, 99.0, 7.0)
