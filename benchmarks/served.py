"""A cluster for benchmarks: ``moonpool serve`` in a process of its own, with default settings unless told otherwise."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Final

import httpx

from benchmarks.harness import Fixture
from benchmarks.line_process import REPOSITORY

START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 45.0
PROBE_PERIOD_S: Final = 0.05
REQUEST_TIMEOUT_S: Final = 120.0
PORTS: Final = range(20000, 30000)
PORT_TRIES: Final = 50
TAIL_CHARS: Final = 400
COMMAND: Final = (sys.executable, "-c", "from cluster.cli.app import main; main()", "serve")
"""What the ``moonpool`` script does, from this source tree."""


class Served:
    """``seconds_to_ready``: from the start of the process to the first 200 of /health. A context manager that ends it."""

    def __init__(self, *options: str) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop
        self._state = tempfile.TemporaryDirectory()  # speeds that an earlier run has learnt would be a head start
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S)
        started = time.monotonic()
        self.process = subprocess.Popen(
            [*COMMAND, "--port", str(port), *options], stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=REPOSITORY, env=_environment() | {"XDG_STATE_HOME": self._state.name},
        )  # fmt: skip
        try:
            self._wait_ready(started)
            self.seconds_to_ready = time.monotonic() - started
            self.model: str = self.http.get("/v1/models").json()["data"][0]["id"]
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_ready(self, started: float) -> None:
        while time.monotonic() - started < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"moonpool serve ended with status {self.process.returncode}: {self._tail()}")
            try:
                if self.http.get("/health", timeout=1.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(PROBE_PERIOD_S)
        raise RuntimeError(f"moonpool serve was not ready in {START_TIMEOUT_S:g} s: {self._tail()}")

    def stop(self) -> None:
        """As Ctrl-C does; by force after a while. Ray's own processes end with the one that started them."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(STOP_TIMEOUT_S)
        self._log.close()
        self._state.cleanup()

    def _tail(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL_CHARS, max(0, size - TAIL_CHARS)).decode(errors="replace").strip()


cluster: Final = Fixture("cluster", Served)


def _environment() -> dict[str, str]:
    """This one's, without what names benchmark data and peers: the cluster refuses settings that it does not know."""
    ours = ("MOONPOOL_DATA", "MOONPOOL_PEER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _free_port() -> int:
    """One that nobody listens on now. Random, so that a port just given up is not the next one taken."""
    generator = random.SystemRandom()
    for _ in range(PORT_TRIES):
        port = generator.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in {PORT_TRIES} tries")
