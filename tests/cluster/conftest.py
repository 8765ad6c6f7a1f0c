"""Real clusters for tests: Ray actors, pool nodes, sockets, HTTP. Each lives in a process of its own (Ray reads its switches
at import),
driven over a pipe by :class:`ClusterProcess`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 60.0


class ClusterProcess:
    """A launcher process (``launcher.py``) that answers one JSON line per JSON line."""

    def __init__(self, overrides: dict[str, Any], *, environment: dict[str, str] | None = None, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.launcher"],
            cwd=REPOSITORY,
            # Speeds that one test's cluster has learnt are not the next one's.
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(log.parent / "state")} | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self.started = self.call("start", timeout_s=START_TIMEOUT_S, overrides=overrides)
        except BaseException:
            self.stop()
            raise
        self.url: str = self.started["url"]
        self.model: str = self.started["model"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, verb: str, *, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """One verb of the launcher. Raises RuntimeError with what went wrong there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), True)
        self._process.stdin.write(json.dumps({"verb": verb} | arguments) + "\n")
        self._process.stdin.flush()
        alarm = _Deadline(timeout_s, self._process)
        with alarm:
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{verb}: the launcher ended (log: {self._log.name})")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{verb}: {answer['error']}")
        return answer["value"]

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0, **options)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of every worker and node that answers."""
        return self.call("stats")

    def stop(self) -> None:
        try:
            if self._process.poll() is None:
                self.call("stop")
                self._process.wait(30)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
            for stream in (self._process.stdin, self._process.stdout, self._log):
                if stream is not None:
                    stream.close()


class _Deadline:
    """Kills the launcher when a call takes too long, so that the read ends."""

    def __init__(self, seconds: float, process: subprocess.Popen[str]) -> None:
        import threading

        self._timer = threading.Timer(seconds, process.kill)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()


def eventually(condition: Callable[[], Any], *, within_s: float = 20.0, what: str = "the condition") -> Any:
    """Poll until ``condition`` is true; fails naming ``what``."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true in {within_s:g} s")
        time.sleep(0.05)


TEXT = "the lazy dog sat on the mat and the quick brown fox jumps over the cat "


def complete(cluster: ClusterProcess, prompt: str, tokens: int = 32, **options: Any) -> Any:
    return cluster.client().completions.create(model=cluster.model, prompt=prompt, max_tokens=tokens, temperature=0, **options)


def all_free(cluster: ClusterProcess) -> bool:
    for name, stats in cluster.stats().items():
        if name.startswith("node-"):
            if stats["leases"] or stats["slots_reserved"]:
                return False
        elif stats["cache_blocks_free"] != stats["cache_blocks"]:
            return False
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_settings(tiny_model: Path) -> dict[str, Any]:
    """Small everything: blocks of 16 tokens, chunks of 64."""
    return {
        "model": {"source": str(tiny_model), "served_name": "tiny", "block_tokens": 16, "chunk_tokens": 64, "self_test": False},
        "prefill": {"device_cache": "8MiB", "threads": 1},
        "decode": {"device_cache": "8MiB", "threads": 1},
        "pool": {"dram": "32MiB"},
        "gateway": {"port": 0},
    }


@pytest.fixture(scope="module")
def tiny_cluster(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """One prefill and one decode worker on the tiny model."""
    cluster = ClusterProcess(tiny_settings, log=tmp_path_factory.mktemp("cluster") / "launcher.log")
    yield cluster
    cluster.stop()
