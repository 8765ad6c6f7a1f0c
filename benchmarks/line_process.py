"""A child process that answers one JSON line per JSON line: what is measured has a process, and threads, of its own.

The child says ``{"ready": true, ...}`` once it can be asked. An answer ``{"error": text}`` is raised here. Whatever else it
or its libraries print goes to stderr; of that, the end is shown when it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

STOP_TIMEOUT_S: Final = 20.0
TAIL_CHARS: Final = 400
REPOSITORY: Final = Path(__file__).resolve().parents[1]


SETTLE_TIMEOUT_S: Final = 10.0
SETTLE_LOOK_S: Final = 0.25
SETTLED_SHARE: Final = 0.1


class ChildError(RuntimeError):
    """The child died, answered with an error, or not in time."""


class LineProcess:
    """Starts ``command``; a context manager that ends it and everything it started."""

    def __init__(
        self, name: str, command: Sequence[str], *, start_timeout_s: float, environment: dict[str, str] | None = None
    ) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in stop
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
            cwd=REPOSITORY, env=os.environ | (environment or {}),
        )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()
        try:
            self.started = self._answer(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> LineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, timeout_s: float, **question: Any) -> dict[str, Any]:
        """Raises :class:`ChildError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildError(f"{self._name} is gone: {self._tail()}") from None
        return self._answer(timeout_s)

    def settle(self) -> None:
        """Wait until the child and all it started leave the processor alone: threads may spin for a while after their work, and
        whoever is measured next would pay for that. Goes on after ``SETTLE_TIMEOUT_S``, with what noise there is."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        before = self._cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(SETTLE_LOOK_S)
            now = self._cpu_seconds()
            if now - before < SETTLED_SHARE * SETTLE_LOOK_S:
                return
            before = now

    def _cpu_seconds(self) -> float:
        root = psutil.Process(self.pid)
        total = 0.0
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        """End of input tells the child to end; then its whole process group is ended by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it may be gone already
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # also after a clean end: a child's own children may be left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self._name} did not answer in {timeout_s:g} s: {self._tail()}") from None
        if line is None:
            self._answers.put(None)  # it stays ended for whoever asks next
            raise ChildError(f"{self._name} ended: {self._tail()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise ChildError(f"{self._name} answered with something that is not JSON") from None
        if "error" in answer:
            raise ChildError(f"{self._name}: {answer['error']}")
        return answer

    def _tail(self) -> str:
        """The end of what it wrote to stderr."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL_CHARS, max(0, size - TAIL_CHARS)).decode(errors="replace").strip()
