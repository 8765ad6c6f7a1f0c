"""Progress of a start: a spinner on a terminal, one line per step elsewhere. Goes to stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text


class StartProgress:
    """Call it with each step's text; a finished step stays on the screen with the time it took."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._status = self._console.status("")
        self._began = self._step_began = time.monotonic()
        self._step = ""

    def __call__(self, step: str) -> None:
        now = time.monotonic()
        if self._console.is_terminal:
            self._leave(now)
            self._status.update(Text(step))
        else:
            self._console.print(Text(f"[{now - self._began:5.1f} s] {step}"))
        self._step, self._step_began = step, now

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._status.stop()

    def _leave(self, now: float) -> None:
        if self._step:
            self._console.print(Text(f"  {self._step} ({now - self._step_began:.1f} s)", style="dim"))
