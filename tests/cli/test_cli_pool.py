"""``moonpool pool`` against a gateway that is not one, a clock that is not one, and a directory that is."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.cli.pool_drain import wait_empty
from cluster.cli.pool_tables import health_text, size_text, state_text
from cluster.client.errors import UnreachableError
from kv_pool.ssd.records import PAGE
from tests.kv_pool.ssd_scene import Filling, Scene, key_of

WIDE = {"COLUMNS": "220", "NO_COLOR": "1", "TERM": "dumb"}


def node(name: str = "node-0", *, planned: bool = True, **status: Any) -> dict[str, Any]:
    slots = {"total": 32, "free": 20, "reserved": 3, "committed": 8, "quarantined": 1}
    counters = {f"slots_{state}": count for state, count in slots.items()} | {"slot_bytes": 3 << 19, "leases": 5, "clients": 4}
    log = {
        "up": True, "records": 77, "live_bytes": 5 << 30, "dead_bytes": 1 << 20, "budget_spent": 7 << 30, "budget_left": 9 << 30,
        "segments": {"free": 6, "open": 2, "sealed": 13, "dying": 1}, "retentions": {"chat": 9, "agent": 0, "coding": 7},
        "write_amplification": 1.0104,
    }  # fmt: skip
    ssd = {"log": log, "disk": {"ssd_phase": "up", "ssd_reason": "", "healthy": True}}
    says = {"node_id": name, "incarnation": "a", "draining": False, "empty": False, "counters": counters, "ssd": ssd} | status
    seen = {"id": name, "live": planned, "draining": not planned}
    return {"id": name, "scheduler": seen, "status": says, "error": None}


def silent(name: str) -> dict[str, Any]:
    return node(name) | {"status": None, "error": f"{name}.status did not answer in 5 s"}


class FakeGateway:
    """``nodes`` by path; ``asked`` is what came."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {"node-0": node("node-0"), "node-1": node("node-1", ssd=None)}
        self.asked: list[tuple[str, str, Any, str | None]] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, order: Any) -> None:
                gateway.asked.append((self.command, self.path, order, self.headers["authorization"]))
                status, answer = gateway.answer(self.path, order)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, order: Any) -> tuple[int, dict[str, Any]]:
        parts = path.strip("/").split("/")
        if parts == ["pool", "nodes"]:
            return 200, {"nodes": list(self.nodes.values())}
        found = self.nodes.get(parts[2])
        if found is None:
            return 404, {"error": {"message": f"There is no pool node `{parts[2]}`.", "code": "node_not_found"}}
        if order is not None:
            found["status"]["draining"] = order["enable"]
            found["scheduler"]["draining"] = order["enable"]
        return 200, found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    yield fake
    fake.close()


@pytest.fixture
def moonpool(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for name in [name for name in os.environ if name.startswith("MOONPOOL_")]:
        monkeypatch.delenv(name)
    return CliRunner(env=WIDE)


# --- inspect ----------------------------------------------------------------------------------------------------------------


def test_inspect_shows_tiers_slots_segments_and_budget(moonpool: CliRunner, gateway: FakeGateway):
    result = moonpool.invoke(app, ["pool", "inspect", "--url", gateway.url])
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines() if "node-" in line]
    assert rows == [
        "node-0 in use 32 20 3 8 1 48.0 MiB 5 4 ? ?",
        "node-1 in use 32 20 3 8 1 48.0 MiB 5 4 ? ?",
        "node-0 up 6 2 13 1 77 5.0 GiB 1.0 MiB 7.0 GiB 9.0 GiB 1.010 chat 9, coding 7",
    ]


def test_inspect_of_one_node_as_json(moonpool: CliRunner, gateway: FakeGateway):
    arguments = ["pool", "inspect", "node-1", "--json", "--url", gateway.url, "--admin-key", "secret"]
    result = moonpool.invoke(app, arguments)
    assert (result.exit_code, json.loads(result.stdout)) == (0, [gateway.nodes["node-1"]])
    assert gateway.asked == [("GET", "/pool/nodes/node-1", None, "Bearer secret")]


def test_inspect_tells_of_a_node_that_does_not_answer(moonpool: CliRunner, gateway: FakeGateway):
    gateway.nodes["node-1"] = silent("node-1")
    result = moonpool.invoke(app, ["pool", "inspect", "--url", gateway.url])
    assert result.exit_code == 1
    assert "error: node-1 does not answer: node-1.status did not answer in 5 s" in result.stderr
    assert any(line.split()[:3] == ["node-1", "no", "answer"] for line in result.stdout.splitlines())


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json", "node-0"], ["drain", "node-0"]])
def test_without_a_cluster_the_status_is_2(moonpool: CliRunner, gateway: FakeGateway, command: list[str]):
    url = gateway.url
    gateway.close()
    result = moonpool.invoke(app, ["pool", *command, "--url", url])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: the server cannot be reached" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "drain"])
def test_an_unknown_node_and_a_wrong_address_are_mistakes(moonpool: CliRunner, gateway: FakeGateway, command: str):
    result = moonpool.invoke(app, ["pool", command, "node/9 ", "--url", gateway.url])
    assert result.exit_code == 2
    assert "There is no pool node `node%2F9%20`" in result.stderr
    assert moonpool.invoke(app, ["pool", command, "node-0", "--url", "localhost"]).exit_code == 2


def test_words_for_states():
    assert state_text(node(draining=True)) == "draining"
    assert state_text(node(draining=True, empty=True)) == "drained, empty"
    assert state_text(node(planned=False)) == "in use, not heard"
    assert health_text({"up": False}, {"ssd_phase": "down", "ssd_reason": "no space", "healthy": False}) == "down (no space)"
    assert health_text({"up": False}, {"ssd_phase": "opening", "healthy": True}) == "opening"
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 1024, 5 * 2**40, 5000 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 TiB", "5000.0 TiB",
    ]  # fmt: skip


# --- drain ------------------------------------------------------------------------------------------------------------------


def test_drain_waits_until_the_node_is_empty(moonpool: CliRunner, gateway: FakeGateway):
    gateway.nodes["node-0"]["status"]["empty"] = True
    result = moonpool.invoke(app, ["pool", "drain", "node-0", "--url", gateway.url])
    assert (result.exit_code, result.stdout) == (0, "node-0: empty\n")
    assert gateway.asked[0] == ("POST", "/pool/nodes/node-0/drain", {"enable": True}, None)


def test_drain_that_is_not_done_in_time_says_so(moonpool: CliRunner, gateway: FakeGateway):
    result = moonpool.invoke(app, ["pool", "drain", "node-0", "--timeout", "0", "--url", gateway.url])
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "node-0: 8 blocks in DRAM, 3 being written, 1 quarantined, 5 leases",
        "node-0 is not empty after 0 s; it is still being drained",
    ]


def test_drain_is_taken_back(moonpool: CliRunner, gateway: FakeGateway):
    result = moonpool.invoke(app, ["pool", "drain", "node-0", "--undo", "--url", gateway.url])
    assert (result.exit_code, result.stdout) == (0, "node-0 is in use again\n")
    assert [order for _, _, order, _ in gateway.asked] == [{"enable": False}]


class Waiting:
    """``wait_empty`` over answers that are given in turn, half a second apart."""

    def __init__(self, *answers: dict[str, Any] | Exception, timeout_s: float = 100.0) -> None:
        self.said: list[str] = []
        self.now = 0.0
        self._answers = list(answers)
        first = self._answers.pop(0)
        assert isinstance(first, dict)
        self.empty = wait_empty(
            first, self._ask, timeout_s=timeout_s, say=self.said.append, clock=lambda: self.now, sleep=self._sleep
        )

    def _ask(self) -> dict[str, Any]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def draining(**status: Any) -> dict[str, Any]:
    return node(planned=status.pop("planned", False), draining=True, **status)


def few(**counters: int) -> dict[str, Any]:
    return {"counters": counters}


def test_each_change_is_said_once_and_the_scheduler_is_waited_for():
    waiting = Waiting(
        node(),  # told, not yet done
        draining(planned=True, **few(slots_committed=2, leases=1)),
        draining(**few(slots_committed=2, leases=1)),
        draining(**few(slots_committed=2, leases=1)),
        UnreachableError("the server cannot be reached (ConnectError)"),
        draining(**few()),
        draining(planned=True, empty=True),
        draining(empty=True),
    )
    assert waiting.empty
    assert waiting.said == [
        "node-0: 8 blocks in DRAM, 3 being written, 1 quarantined, 5 leases; the scheduler has yet to hear of it",
        "node-0: 2 blocks in DRAM, 1 leases; the scheduler has yet to hear of it",
        "node-0: 2 blocks in DRAM, 1 leases",
        "node-0: no answer (the server cannot be reached (ConnectError))",
        "node-0: nearly empty",
        "node-0: empty; the scheduler has yet to hear of it",
        "node-0: empty",
    ]


def test_time_ends_the_wait_and_nothing_is_asked_after_it():
    waiting = Waiting(draining(), draining(), timeout_s=1.2)
    assert not waiting.empty
    assert waiting.now == 1.2
    assert waiting.said[-1] == "node-0 is not empty after 1.2 s; it is still being drained"


def test_a_node_that_is_in_use_again_is_not_empty_however_empty_it_is():
    restarted = Waiting(draining(), draining(incarnation="b", empty=True))
    assert (restarted.empty, restarted.said[-1]) == (False, "node-0 has restarted, so it is in use again")
    taken = Waiting(draining(), node(planned=False, empty=True))
    assert (taken.empty, taken.said[-1]) == (False, "node-0 was taken into use again by somebody else")


# --- verify -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two records in the first segment."""
    scene = Scene(str(tmp_path / "ssd"), segment_bytes=64 * PAGE)
    scene.start()
    scene.write(Filling(0, 1), [(key_of(1), 100), (key_of(2), 2 * PAGE)])
    scene.stop()
    return tmp_path / "ssd"


def test_verify_of_a_sound_directory(moonpool: CliRunner, directory: Path):
    result = moonpool.invoke(app, ["pool", "verify", str(directory)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert ": 2 records good, 0 bad, 0 expired, 0 not reachable; 0 damaged segment pages" in result.stdout


def test_verify_names_every_bad_record(moonpool: CliRunner, directory: Path):
    segment = directory / "segment-000000.kv"
    content = bytearray(segment.read_bytes())
    content[2 * PAGE] ^= 1  # the first payload: behind the segment's and the record's header page
    segment.write_bytes(content)
    text = moonpool.invoke(app, ["pool", "verify", str(directory)])
    assert text.exit_code == 1
    assert text.stdout.splitlines()[0] == "segment 0, page 1: the payload does not have its checksum"
    assert ": 1 records good, 1 bad," in text.stdout
    told = moonpool.invoke(app, ["pool", "verify", "--json", str(directory)])
    answer = json.loads(told.stdout)
    assert (told.exit_code, answer["bad"], answer["report"]["bad"]) == (
        1, [{"segment": 0, "page": 1, "reason": "the payload does not have its checksum"}], 1,
    )  # fmt: skip


def test_verify_that_cannot_be_done(moonpool: CliRunner, directory: Path, tmp_path: Path):
    scene = Scene(str(directory), segment_bytes=64 * PAGE)
    scene.start()
    try:
        in_use = moonpool.invoke(app, ["pool", "verify", str(directory)])
    finally:
        scene.stop()
    absent = moonpool.invoke(app, ["pool", "verify", str(tmp_path / "nowhere")])
    strange = moonpool.invoke(app, ["pool", "verify", str(tmp_path)])
    assert [each.exit_code for each in (in_use, absent, strange)] == [2, 2, 2]
    assert "a node has the directory open" in in_use.stderr
    assert "nowhere: No such file or directory" in absent.stderr
    assert "error: " in strange.stderr
