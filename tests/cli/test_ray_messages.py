"""Standard output is the command's own, whatever Ray has to say."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from cluster.cli.ray_messages import first_sentence, ray_messages_aside

DIED = "\x1b[33m(raylet)\x1b[0m A worker died or was killed. To troubleshoot the problem, check the logs. Worker PID: 7"


def test_what_ray_prints_is_taken_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    out, notes = io.StringIO(), list[str]()
    monkeypatch.setattr(sys, "stdout", out)
    with ray_messages_aside(notes.append):
        print("ours")
        for name in ("ray_listen_error_messages", "other"):
            thread = threading.Thread(target=lambda: print(DIED), name=name)
            thread.start()
            thread.join()
        assert not sys.stdout.isatty()
    assert sys.stdout is out
    assert out.getvalue() == f"ours\n{DIED}\n"
    assert notes == ["A worker died or was killed."]


def test_standard_output_comes_back_after_an_error() -> None:
    before = sys.stdout
    with pytest.raises(ValueError, match="x"), ray_messages_aside(print):
        raise ValueError("x")
    assert sys.stdout is before


@pytest.mark.parametrize(
    ("message", "said"),
    [("\n", ""), ("(pid=3) Hello", "Hello"), ("v2.0 is out. Read on.", "v2.0 is out."), ("x" * 999, "x" * 300)],
)
def test_first_sentence(message: str, said: str) -> None:
    assert first_sentence(message) == said
