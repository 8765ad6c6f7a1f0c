"""One node's accelerators, as one: either a prefill piece runs on them or a run of decode steps. Prefill goes first, as in
engines that serve both from one pool of workers; where a worker has the node to itself, nobody ever waits."""

from __future__ import annotations

from collections.abc import Callable


class Accelerator:
    """``yields`` is asked of a decode run that holds it: it is to end its step and call :meth:`free`."""

    def __init__(self) -> None:
        self._holder: str | None = None
        self._waiting_prefill: Callable[[], None] | None = None
        self._waiting_decode: Callable[[], None] | None = None
        self.decode_yields: Callable[[], None] | None = None

    def prefill(self, start: Callable[[], None]) -> None:
        """Call ``start`` as soon as it is free. Asked again before that, nothing changes."""
        if self._holder is None:
            self._holder = "prefill"
            start()
        elif self._waiting_prefill is None:
            self._waiting_prefill = start
            if self._holder == "decode" and self.decode_yields is not None:
                self.decode_yields()

    def decode(self, start: Callable[[], None]) -> None:
        if self._holder is None:
            self._holder = "decode"
            start()
        else:
            self._waiting_decode = start

    @property
    def prefill_waits(self) -> bool:
        return self._waiting_prefill is not None

    def free(self) -> None:
        """Its holder is done."""
        self._holder = None
        start, self._waiting_prefill = self._waiting_prefill, None
        if start is not None:
            self.prefill(start)
            return
        start, self._waiting_decode = self._waiting_decode, None
        if start is not None:
            self.decode(start)
