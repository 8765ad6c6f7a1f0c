"""Ctrl-C, SIGTERM and a closed terminal: the first one asks for a clean end, the second one forces it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Belongs to the main thread. ``force`` is called by the second signal and should not return.

    A pipe, not an Event, carries the news: a handler that runs inside ``Event.wait`` of its own thread can deadlock on it.
    """

    def __init__(self, force: Callable[[], object]) -> None:
        self._force = force
        self._received = 0
        self._interrupting = False

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def install(self) -> None:
        """Take the signals, again where somebody else has taken them meanwhile (Ray does as it starts)."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt: for work that cleans up behind itself."""
        self._interrupting = True
        try:
            yield
        finally:
            self._interrupting = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until a signal came (True) or ``timeout_s`` is over (False)."""
        return bool(select.select([self._reader], [], [], timeout_s)[0])

    def _handle(self, _: int, __: FrameType | None) -> None:
        self._received += 1
        if self._received > 1:
            self._force()
        os.write(self._writer, b"x")
        if self._interrupting:
            raise KeyboardInterrupt
