"""The clock and the network of a worker that can freeze: a stopped process, a host that swaps, a driver that hangs.

Whatever would happen to the worker while it is frozen happens, in the same order, when it goes on. What others do for it goes
on meanwhile: bytes that were asked for arrive. A frozen worker is the one that others give up and that later acts on what was
true before, so it is what fences are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cluster.simulator.kernel import Kernel
from cluster.simulator.links import Flow, Network, Port


class PausableClock:
    """A kernel's clock whose calls wait until ``frozen_until``."""

    def __init__(self, kernel: Kernel) -> None:
        self.frozen_until = 0.0
        self._kernel = kernel

    @property
    def now(self) -> float:
        return self._kernel.now

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        self._kernel.at(time, self.run, call, args)

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._kernel.after(seconds, self.run, call, args)

    def run(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Run ``call(*args)`` now, or when the worker goes on."""
        if self._kernel.now < self.frozen_until:
            self._kernel.at(self.frozen_until, self.run, call, args)
        else:
            call(*args)


class PausableNetwork:
    """Flows that end as ever; a frozen worker hears of it later, unless it has cancelled them by then."""

    def __init__(self, network: Network, clock: PausableClock) -> None:
        self._network = network
        self._clock = clock
        self._open: dict[Flow, None] = {}

    def start(self, ports: Sequence[Port], size: int, done: Callable[[], None], *, latency_s: float = 0.0) -> Flow:
        flow: Flow | None = None

        def ended() -> None:
            self._clock.run(heard, ())

        def heard() -> None:
            if flow in self._open:
                del self._open[flow]
                done()

        flow = self._network.start(ports, size, ended, latency_s=latency_s)
        self._open[flow] = None
        return flow

    def cancel(self, flow: Flow) -> None:
        self._open.pop(flow, None)
        self._network.cancel(flow)


class PausableDoor:
    """What the gateway sends to a worker that can freeze."""

    def __init__(self, worker: Any, clock: PausableClock) -> None:
        self._worker = worker
        self._clock = clock

    def submit(self, task: Any) -> None:
        self._clock.run(self._worker.submit, (task,))

    def abort(self, request: tuple[str, int]) -> None:
        self._clock.run(self._worker.abort, (request,))
