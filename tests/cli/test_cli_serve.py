"""``moonpool serve`` as a process: it starts, says how to use it, and ends as it is told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_cluster.py")
LIMIT_S = 20.0


class Command:
    """A ``moonpool`` process whose output is read line by line."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE), *arguments], cwd=REPOSITORY, env=kept | {"PYTHONPATH": str(REPOSITORY)} | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def read_until(self, pattern: str) -> str:
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:  # ends with the process at the latest, and the test has a limit of its own
            seen += line
            if re.search(pattern, line):
                return seen
        pytest.fail(f"no line with {pattern!r} in:\n{seen}\n{self.process.stderr and self.process.stderr.read()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


Run = Callable[..., Command]


@pytest.fixture
def run() -> Iterator[Run]:
    commands: list[Command] = []

    def start(*arguments: str, **environment: str) -> Command:
        commands.append(Command(*arguments, **environment))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serves_until_a_signal_and_stops_cleanly(run: Run, number: int) -> None:
    command = run("serve", "--port", "0")
    said = command.read_until("Ctrl-C stops it")
    assert "moonpool serves tiny at http://127.0.0.1:8123/v1" in said
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in said
    command.signal(number)
    status, out, err = command.end()
    assert status == 0
    assert out.split() == ["stopping", "stopped"]
    assert "ray: starting" in err


def test_a_second_signal_forces(run: Run) -> None:
    command = run("serve", FAKE_STOP_S="60")
    command.read_until("Ctrl-C stops it")
    command.signal(signal.SIGINT)
    command.read_until("stopping")
    began = time.monotonic()
    command.signal(signal.SIGINT)
    status, out, err = command.end()
    assert (status, out) == (130, "")
    assert "by force" in err
    assert time.monotonic() - began < 5


def test_a_stop_that_hangs_ends_at_its_deadline(run: Run) -> None:
    command = run("serve", FAKE_STOP_S="60", FAKE_DEADLINE_S="0.3")
    command.read_until("Ctrl-C stops it")
    command.signal(signal.SIGTERM)
    status, out, _ = command.end()
    assert (status, out) == (130, "stopping\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_cleans_up(run: Run, number: int) -> None:
    command = run("serve", FAKE_START_S="60")
    command.read_until("starting")
    command.signal(number)
    status, out, err = command.end()
    assert (status, out) == (130, "cleaned\n")
    assert "stopped before it was ready" in err


def test_a_start_that_fails_says_why(run: Run) -> None:
    status, out, err = run("serve", FAKE_START_ERROR="decode-0 did not start: no memory").end()
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "error: decode-0 did not start: no memory"
