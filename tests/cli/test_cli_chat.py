"""The conversation behind ``moonpool chat``, and the command itself through a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cluster.cli.conversation import Conversation
from cluster.client.blocking import Client

REPOSITORY = Path(__file__).parents[2]


class Echo(BaseHTTPRequestHandler):
    """Answers a chat with the number of its messages and the last one; ``fail`` fails."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Echo.seen.append(body)
        messages = body["messages"]
        if messages[-1]["content"] == "fail":
            self._send(429, json.dumps({"error": {"message": "at capacity", "type": "rate_limit_error"}}).encode())
            return
        texts = [f"{len(messages)}:", messages[-1]["content"].upper()]
        choices = [[{"index": 0, "delta": {"content": text}, "finish_reason": None}] for text in texts]
        chunks = [{"model": "m", "choices": row} for row in [*choices, [{"index": 0, "delta": {}, "finish_reason": "stop"}]]]
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        detail = {"attempts": 2, "cached_tokens": {"device": 0, "dram": 4}}
        chunks.append({"model": "m", "choices": [], "usage": usage, "moonpool": {"choices": [detail]}})
        self._send(200, b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def talk(url: str, lines: list[str], system: str = "") -> tuple[int, str, list[str], Conversation]:
    said: list[str] = []
    notes: list[str] = []
    with Client(url, model="m", retries=0) as client:
        conversation = Conversation(client, system=system, options={"max_tokens": 7}, say=said.append, note=notes.append)
        return conversation.run(lines), "".join(said), notes, conversation


def test_history_grows_and_is_forgotten(url: str) -> None:
    failed, said, notes, conversation = talk(
        url, ["one\n", "\n", " two \n", "/reset\n", "three\n", "/exit\n", "four\n"], "be brief"
    )
    assert failed == 0
    assert said == "2:ONE\n4:TWO\n2:THREE\n"
    assert [message["content"] for message in conversation.history] == ["be brief", "three", "2:THREE"]
    assert notes[2] == "forgotten"
    assert notes[0].startswith("[prompt 9, cached 4 (dram 4) | TTFT 0.0")
    assert notes[0].endswith("| 2 attempts]")
    assert Echo.seen[-1]["max_tokens"] == 7


def test_a_failed_turn_leaves_no_trace(url: str) -> None:
    failed, said, notes, conversation = talk(url, ["one", "fail", "two", "/nonsense"])
    assert failed == 1
    assert said == "1:ONE\n\n3:TWO\n"
    assert "error: at capacity" in notes
    assert notes[-1] == "commands: /reset /exit"
    assert [message["content"] for message in conversation.history] == ["one", "1:ONE", "two", "3:TWO"]


def test_an_interrupted_answer_leaves_no_trace(url: str) -> None:
    def interrupt(_: str) -> None:
        if not notes:
            notes.append("x")
            raise KeyboardInterrupt

    notes: list[str] = []
    with Client(url, model="m") as client:
        conversation = Conversation(client, system="", options={}, say=interrupt, note=notes.append)
        assert conversation.run(["one", "two"]) == 1
    assert [message["content"] for message in conversation.history] == ["two", "1:TWO"]
    assert "ended" in notes


def piped(url: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = "from cluster.cli.app import main; main()"
    command = [sys.executable, "-c", script, "chat", "--url", url, "--model", "m", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True, timeout=30, check=False)


def test_through_a_pipe(url: str) -> None:
    done = piped(url, "one\ntwo\n", "--system", "s")
    assert (done.returncode, done.stdout) == (0, "2:ONE\n4:TWO\n")
    assert done.stderr.count("[prompt 9, cached 4 (dram 4)") == 2


def test_through_a_pipe_a_failure_is_the_exit_status(url: str) -> None:
    assert piped(url, "fail\n").returncode == 1
    assert piped("nonsense", "one\n").returncode == 2
