"""What benchmarks stand on: child processes, prompts of exact length, reading a stream, the peer's environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.cluster_latency import Timed, expect, first_token
from benchmarks.harness import SkipBenchmark
from benchmarks.idle_and_ready import Family
from benchmarks.line_process import ChildError, LineProcess
from benchmarks.prompts import Words
from benchmarks.vllm_rates import PEERS, make_environment, peer_folder

CHILD = """
import os, sys, time
from benchmarks.peers.lines import answers_to_own_stdout, serve
answer = answers_to_own_stdout()
print("a library's chatter", flush=True)
os.system("echo chatter of another process")
def handle(question):
    if question["do"] == "fail": raise ValueError("no such thing")
    if question["do"] == "die": sys.stderr.write("last words"); sys.stderr.flush(); os._exit(3)
    if question["do"] == "sleep": time.sleep(30)
    return {"twice": 2 * question["number"]}
serve(answer, handle, pid=os.getpid())
"""


def child() -> LineProcess:
    return LineProcess("child", [sys.executable, "-c", CHILD], start_timeout_s=20)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_answers_line_by_line_whatever_it_prints_besides():
    with child() as asked:
        assert asked.started["pid"] == asked.pid
        assert asked.ask(10, do="double", number=4) == {"twice": 8}
        with pytest.raises(ChildError, match="ValueError: no such thing"):
            asked.ask(10, do="fail")
        assert asked.ask(10, do="double", number=5) == {"twice": 10}
    assert gone(asked.pid)


def test_a_child_that_dies_says_its_last_words():
    with child() as asked:
        with pytest.raises(ChildError, match="last words"):
            asked.ask(10, do="die")
        with pytest.raises(ChildError, match="last words"):
            asked.ask(10, do="double", number=1)


def test_a_child_that_does_not_answer_is_an_error_in_time_and_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.line_process.STOP_TIMEOUT_S", 0.2)
    with child() as asked:
        started = time.monotonic()
        with pytest.raises(ChildError, match=r"did not answer in 0\.2 s"):
            asked.ask(0.2, do="sleep")
        assert time.monotonic() - started < 5
    assert gone(asked.pid)


def test_a_child_that_does_not_start_says_why():
    with pytest.raises(ChildError, match="No module named 'no_such_module'"):
        LineProcess("child", [sys.executable, "-c", "import no_such_module"], start_timeout_s=20)


class Letters:
    """A tokenizer of words: odd ids are words of one token, even ones are not words."""

    vocab_size = 4000

    def decode(self, ids: list[int]) -> str:
        name = "".join(chr(97 + int(digit)) for digit in f"{ids[0]:04d}")
        return f" {name}" if ids[0] % 2 else name.upper()

    def encode(self, text: str) -> list[int]:
        return [sum((ord(c) - 97) * 10**p for p, c in enumerate(reversed(word))) for word in text.split()]


def test_text_has_exactly_the_tokens_that_were_asked_for():
    words = Words(Letters())  # type: ignore[arg-type]
    shared, rest = words.text(2048, seed=1), words.text(40, seed=2)
    assert len(words.ids(shared)) == 2048
    assert words.ids(shared + rest) == words.ids(shared) + words.ids(rest)
    assert words.text(40, seed=2) == rest != words.text(40, seed=3)


def test_a_tokenizer_without_words_is_refused():
    letters = Letters()
    letters.vocab_size = 100
    with pytest.raises(ValueError, match="50 words"):
        Words(letters)  # type: ignore[arg-type]


def stream(*chunks: dict[str, Any], status: int = 200) -> Any:
    """A cluster that answers every request with these chunks."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["stream_options"] == {"include_usage": True}
        assert request.headers["x-moonpool-details"] == "1"
        return httpx.Response(status, text=text)

    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer))
    return SimpleNamespace(model="m", http=client)


LAST = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
    "moonpool": {"choices": [{"handoff_s": 0.004}]},
}


def test_the_first_token_is_the_first_text():
    timed = first_token(stream({"choices": [{"text": ""}]}, {"choices": [{"text": " a"}]}, LAST), "prompt")
    assert timed.ttft_s > 0
    assert (timed.prompt_tokens, timed.cached_tokens, timed.handoff_s) == (9, 8, 0.004)


@pytest.mark.parametrize(
    ("served", "message"),
    [
        (stream(LAST, status=429), "status 429"),
        (stream(LAST), "no text"),
        (stream({"error": {"message": "x"}}), "ended in an error"),
    ],
)
def test_what_is_no_answer_is_no_measurement(served: Any, message: str):
    with pytest.raises(RuntimeError, match=message):
        first_token(served, "prompt")


def test_a_request_that_hit_something_else_is_no_measurement():
    timed = Timed(0.1, 2088, 1984, None)
    assert expect(timed, prompt=2088, cached=1984) is timed
    with pytest.raises(RuntimeError, match="1984 of 2088 tokens cached, expected 2048"):
        expect(timed, prompt=2088, cached=2048)


def test_processor_time_of_a_family_counts_children_and_only_since_the_last_call():
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as root:  # fmt: skip
        assert root.stdout is not None
        family = Family(root.pid)
        assert root.stdout.readline() == "done\n"
        first, second = family.used(), family.used()
        assert family.actors() == 0
        root.communicate("\n")
    assert first >= 0.3
    assert second < 0.1


def test_the_peers_folder_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MOONPOOL_PEER_VLLM", str(tmp_path))
    assert peer_folder() == tmp_path


def test_a_folder_that_is_not_the_peers_is_left_alone_and_a_skip(tmp_path: Path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(SkipBenchmark, match="does not import"):
        make_environment(tmp_path)
    assert (tmp_path / "precious").read_text() == "data"


def test_an_environment_that_cannot_be_made_is_a_skip_and_tried_again_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "peer"
    monkeypatch.setattr("benchmarks.vllm_rates.sys.executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(SkipBenchmark, match="no virtual environment"):
            make_environment(target)


def test_the_peers_script_needs_nothing_of_ours():
    text = (PEERS / "vllm_cpu.py").read_text()
    assert "import benchmarks" not in text
    assert "from benchmarks" not in text
