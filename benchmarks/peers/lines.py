"""The child's side of :class:`benchmarks.line_process.LineProcess`. Standard library only: peers use it too."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answers_to_own_stdout() -> Callable[[dict[str, Any]], None]:
    """A function that writes an answer. Afterwards everything else that prints to stdout, C libraries too, prints to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return answer


def serve(answer: Callable[[dict[str, Any]], None], handle: Callable[[dict[str, Any]], dict[str, Any]], **ready: Any) -> None:
    """Answer questions until the input ends."""
    answer({"ready": True} | ready)
    for line in sys.stdin:
        try:
            reply = handle(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answer(reply)
