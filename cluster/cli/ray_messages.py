"""Ray's own messages, kept off standard output.

When a worker dies, a thread of Ray's prints a page about it to ``sys.stdout`` of the process that started the cluster. That
belongs to our command (an answer may be streaming there), so what comes from Ray's threads is taken aside.
"""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

RAY_THREADS: Final = "ray_"
SAID_CHARS_MAX: Final = 300
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def ray_messages_aside(note: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``note`` gets the first sentence of each message of Ray's, and standard output everything else."""
    before = sys.stdout
    sys.stdout = _Divided(before, note)
    try:
        yield
    finally:
        sys.stdout = before


def first_sentence(message: str) -> str:
    """``(raylet) A worker died. To find out why, ...`` as ``A worker died.``; '' for nothing."""
    text = _COLOUR.sub("", message).strip()
    text = re.sub(r"^\(.*?\)\s*", "", text)
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0][:SAID_CHARS_MAX]


class _Divided(io.TextIOBase):
    def __init__(self, out: TextIO, note: Callable[[str], None]) -> None:
        self._out = out
        self._note = note

    def write(self, text: str, /) -> int:
        if not threading.current_thread().name.startswith(RAY_THREADS):
            return self._out.write(text)
        if said := first_sentence(text):
            self._note(said)
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    @property
    def encoding(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  (rich chooses its boxes by it)
        return self._out.encoding
