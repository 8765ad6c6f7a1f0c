"""The demo on a scripted cluster: what it asks, whom it kills, and that it notices whatever does not happen."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.config.schema import ClusterConfig
from cluster.demo import play as play_module
from cluster.demo import script, sizing
from cluster.demo.play import play
from cluster.launch import WorkerInfo

PIECES = 12
GIB = 2**30


@dataclass
class Scripted:
    """A cluster that answers every chat with twelve words. The switches make one promise fail each."""

    url: str = ""
    model_name: str = "tiny"
    description: dict[str, str] = field(default_factory=lambda: {"dtype": "float32", "device": "cpu"})
    warm: bool = True
    chat_hits: bool = True
    other_text_after_kill: bool = False
    counts_tokens: bool = True
    attempts_after_kill: int = 2
    asked: list[list[dict[str, str]]] = field(default_factory=list)
    made: int = 0
    killed: list[str] = field(default_factory=list)

    def workers(self) -> list[WorkerInfo]:
        return [WorkerInfo(name, name.split("-")[0], 7) for name in ("prefill-0", "decode-0", "decode-1", "node-0")]

    def stats(self, worker_id: str) -> dict[str, int]:
        return {"pid": 7, "tokens_total": self.made if worker_id == "decode-1" and self.counts_tokens else 100}

    def kill_worker(self, worker_id: str) -> int:
        self.killed.append(worker_id)
        return 7

    def answer(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        first = not self.asked
        self.asked.append(messages)
        prompt = sum(len(message["content"]) for message in messages) // 4
        hit = self.chat_hits if len(messages) > 1 else self.warm and not first and "chapter" in messages[0]["content"]
        cached = prompt // 64 * 64 if hit else 0
        for i in range(PIECES):
            self.made += 1
            word = "other " if self.killed and self.other_text_after_kill and i == PIECES - 1 else f"word{i} "
            yield {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"prompt_tokens": prompt, "completion_tokens": PIECES, "prompt_tokens_details": {"cached_tokens": cached}}
        detail = {"attempts": self.attempts_after_kill if self.killed else 1, "cached_tokens": {"device": 0, "dram": cached}}
        yield {"choices": [], "usage": usage, "moonpool": {"choices": [detail]}}


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    cluster = Scripted()
    read = threading.Semaphore(0)  # one piece goes out when the one before it has been seen: the kill is always in mid-answer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            cold = not cluster.asked
            self.send_response(200)
            self.end_headers()
            if cold:
                threading.Event().wait(0.3)
            for chunk in cluster.answer(body["messages"]):
                self.wfile.write(f"data: {json.dumps({'model': 'tiny'} | chunk)}\n\n".encode())
                self.wfile.flush()
                if chunk["choices"] and chunk["choices"][0]["delta"]:
                    assert read.acquire(timeout=10)
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None: ...

    class Acknowledging(play_module.Stage):
        def ask(self, *args: Any, after: Any = None, **options: Any) -> Any:
            def seen(pieces: int) -> None:
                if after is not None:
                    after(pieces)
                read.release()

            return super().ask(*args, after=seen, **options)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(play_module, "Stage", Acknowledging)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield cluster
        server.shutdown()
        thread.join()


def played(cluster: Scripted, **config: Any) -> tuple[bool, str]:
    out = io.StringIO()
    kept = play(cluster, ClusterConfig.model_validate(config), Console(file=out, width=160))  # type: ignore[arg-type]
    return kept, out.getvalue()


def test_all_acts(scripted: Scripted) -> None:
    kept, shown = played(scripted)
    assert kept, shown
    assert scripted.killed == ["decode-1"]  # the one whose counter moved
    questions = [messages for messages in scripted.asked if "chapter" in messages[0]["content"]]
    assert len(questions) == len(script.QUESTIONS) + 2
    assert len({messages[0]["content"].split("Question:")[0] for messages in questions}) == 1  # one common prefix
    assert questions[-1] == questions[-2]
    second_turn = scripted.asked[len(script.QUESTIONS) + 1]
    assert [message["role"] for message in second_turn] == ["user", "assistant", "user"]
    assert "Everything promised happened" in shown
    assert ">>> SIGKILL to decode-1 (pid 7) <<<" in shown
    for label in ("Q1", "Q4", "chat 2", "Q5, killed"):
        assert f" {label} " in shown


@pytest.mark.parametrize(
    ("switches", "broken"),
    [
        ({"warm": False}, "the others found the document cached"),
        ({"chat_hits": False}, "the second turn of the chat found its first"),
        ({"other_text_after_kill": True}, "and is the same, to the letter"),
        ({"counts_tokens": False}, "killed in the middle"),
        ({"attempts_after_kill": 1}, "killed in the middle"),
    ],
)
def test_whatever_does_not_happen_is_told(scripted: Scripted, switches: dict[str, Any], broken: str) -> None:
    for name, value in switches.items():
        setattr(scripted, name, value)
    kept, shown = played(scripted)
    assert not kept
    assert any("NO" in line and broken in line for line in shown.splitlines()), shown
    assert "NOT everything promised happened" in shown


def test_other_dtypes_promise_no_equal_text(scripted: Scripted) -> None:
    scripted.description = {"dtype": "bfloat16", "device": "cpu"}
    scripted.other_text_after_kill = True
    kept, shown = played(scripted)
    assert kept
    assert "to the letter" not in shown


def test_under_bitwise_whole_chunks_count(scripted: Scripted) -> None:
    scripted.chat_hits = False  # the first turn is shorter than a chunk: there is nothing to find
    kept, shown = played(scripted, model={"reuse": "bitwise"})
    assert kept
    assert "less than one unit of 256" in shown


def test_a_cluster_that_is_gone_ends_the_demo(scripted: Scripted) -> None:
    scripted.url = "http://127.0.0.1:9"
    kept, shown = played(scripted)
    assert not kept
    assert "The demo ends here: the server cannot be reached" in shown


def test_the_document_is_long_and_real() -> None:
    assert script.document().startswith("CHAPTER VII")
    assert 1500 < len(script.document().split()) < 2500
    assert script.document().isascii()


@pytest.mark.parametrize(
    ("cores", "memory", "workers"), [(2, 4 * GIB, (1, 1)), (2, 6 * GIB, (1, 2)), (7, 64 * GIB, (1, 2)), (8, 12 * GIB, (2, 2))]
)
def test_sizes(cores: int, memory: int, workers: tuple[int, int]) -> None:
    assert sizing.workers_for(cores, memory) == workers


def test_memory_is_the_lesser_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert sizing.available_bytes(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert sizing.available_bytes(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("4096\n")
    assert sizing.available_bytes(meminfo, tmp_path) == 3072


def test_the_demo_s_defaults_are_a_valid_configuration() -> None:
    from cluster.config.load import load_config

    loaded = load_config(defaults=sizing.defaults(), environment={}, sets=["decode.workers=1"])
    assert loaded.config.decode.workers == 1
    assert loaded.config.gateway.port == 0
    assert loaded.origins["gateway.port"] == "demo"
