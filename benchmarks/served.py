"""A cluster for benchmarks: ``moonpool serve`` in a process of its own, started when first asked for, stopped at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Final

import httpx

from benchmarks.harness import registry

START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0
PORT_RANGE: Final = range(20000, 30000)


class Served:
    """``seconds_to_ready``: from the start of the process to the first 200 of /health."""

    def __init__(self, *options: str) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w", prefix="moonpool-bench-", suffix=".log", delete=False)  # noqa: SIM115 - closed in stop
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.app", "serve", "--port", str(self.port), *options],
            stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._wait_ready(started)
        self.seconds_to_ready = time.monotonic() - started
        self.http = httpx.Client(base_url=self.url, timeout=120.0)
        self.model: str = self.http.get("/v1/models").json()["data"][0]["id"]

    def _wait_ready(self, started: float) -> None:
        while time.monotonic() - started < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"moonpool serve ended with {self.process.returncode}; its output is in {self._log.name}")
            try:
                if httpx.get(f"{self.url}/health", timeout=1.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"moonpool serve was not ready in {START_TIMEOUT_S:g} s; its output is in {self._log.name}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(STOP_TIMEOUT_S)
        self._log.close()


_shared: Served | None = None


def shared_cluster() -> Served:
    """One prefill and one decode worker with default settings; the same for all benchmarks of a run."""
    global _shared
    if _shared is None:
        _shared = Served()
        registry.closers.append(stop_shared)
    return _shared


def stop_shared() -> None:
    global _shared
    if _shared is not None:
        _shared.stop()
        _shared = None


def _free_port() -> int:
    for port in PORT_RANGE:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")
