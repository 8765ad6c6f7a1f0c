"""Links, disks and buses that transfers share. A fluid model: no packets, no chunks.

A flow runs through a few *ports* (a sender's NIC, a receiver's, a drive) at the least of its shares::

    rate(flow) = min over its ports of  bandwidth(port) / flows at the port

and whenever a flow comes or goes, those it shares a port with get their new rates. A port that is left over by a flow with a
narrower one elsewhere is not given to the others: a little pessimistic, and exact where one port is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.simulator.kernel import Kernel


class Port:
    """``bytes_per_s`` may change while flows run (:meth:`Network.set_speed`)."""

    __slots__ = ("bytes_per_s", "flows", "moved")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.moved = 0
        """Bytes of all flows that ended here."""


class Flow:
    """``done()`` is called once when all bytes are through, unless it is cancelled."""

    __slots__ = ("_as_of", "_done", "_generation", "_left", "ports", "rate", "size")

    def __init__(self, ports: Sequence[Port], size: int, done: Callable[[], None], now: float) -> None:
        self.ports = ports
        self.size = size
        self.rate = 0.0
        self._left = float(size)
        self._as_of = now
        self._generation = 0
        self._done = done

    def settle(self, now: float) -> None:
        """Book what has gone through since."""
        self._left = max(0.0, self._left - self.rate * (now - self._as_of))
        self._as_of = now


class Network:
    """All flows of the world."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.flows = 0

    def start(self, ports: Sequence[Port], size: int, done: Callable[[], None], *, latency_s: float = 0.0) -> Flow:
        """Move ``size`` bytes through ``ports``; ``latency_s`` comes first."""
        flow = Flow(ports, size, done, self._kernel.now)
        if latency_s > 0.0:
            self._kernel.after(latency_s, self._enter, flow, 0)
        else:
            self._enter(flow, 0)
        return flow

    def cancel(self, flow: Flow) -> None:
        """``done`` will not be called."""
        flow._generation += 1
        self._leave(flow)

    def set_speed(self, port: Port, bytes_per_s: float) -> None:
        for flow in port.flows:
            flow.settle(self._kernel.now)
        port.bytes_per_s = bytes_per_s
        self._rate(dict.fromkeys(port.flows))

    def _enter(self, flow: Flow, generation: int) -> None:
        if flow._generation != generation:
            return  # cancelled within its latency
        self.flows += 1
        flow._as_of = self._kernel.now
        touched: dict[Flow, None] = {flow: None}
        for port in flow.ports:
            for other in port.flows:
                touched[other] = None
            port.flows[flow] = None
        self._rate(touched)

    def _leave(self, flow: Flow) -> None:
        touched: dict[Flow, None] = {}
        for port in flow.ports:
            if port.flows.pop(flow, touched) is None:
                for other in port.flows:
                    touched[other] = None
        self._rate(touched)

    def _rate(self, flows: dict[Flow, None]) -> None:
        now = self._kernel.now
        for flow in flows:
            rate = min(port.bytes_per_s / len(port.flows) for port in flow.ports)
            if rate != flow.rate or not flow._generation:
                flow.settle(now)
                flow.rate = rate
                flow._generation += 1
                self._kernel.after(flow._left / rate, self._ended, flow, flow._generation)

    def _ended(self, flow: Flow, generation: int) -> None:
        if flow._generation != generation:
            return
        flow._generation += 1
        for port in flow.ports:
            port.moved += flow.size
        self._leave(flow)
        flow._done()
