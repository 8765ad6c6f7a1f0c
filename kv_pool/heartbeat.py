"""Heartbeats of a node or a worker to the scheduler: one thread, one socket, nothing that can hang the owner.

::

    resolve() --endpoint--> DEALER --payload (msgpack map)--> scheduler's ROUTER
                                   <--reply (msgpack map)---

The scheduler may be absent, restart elsewhere or hang at any moment: the endpoint is asked for at the start and again after
``SILENT_PERIODS`` periods without a reply, on a thread of its own, because asking (Ray's head) can block for as long as it likes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, cast

import msgpack
import zmq

from kv_pool.transport.curve import CurveKeys, connect

log = logging.getLogger(__name__)

SILENT_PERIODS: Final = 4
"""Periods without a reply after which the endpoint is asked for again."""
REPLY_BYTES_MAX: Final = 64 * 1024
REPLIES_PER_TURN_MAX: Final = 16
WAITING_MAX: Final = 4
"""Heartbeats that zmq may hold back: older ones tell nothing."""
CONNECT_POLL_S: Final = 0.02
"""How soon a heartbeat is tried again that found no connection yet."""
JOIN_TIMEOUT_S: Final = 5.0


class HeartbeatSender:
    """``payload()`` is called once per heartbeat that goes out, ``on_reply(reply)`` once per reply, both on the sender's thread.

    Whatever they or ``resolve`` raise is logged and costs that heartbeat only. ``start`` and ``stop`` are for the owner's thread;
    ``stop`` returns within ``JOIN_TIMEOUT_S`` even where ``resolve`` hangs.
    """

    def __init__(
        self,
        *,
        resolve: Callable[[], str | None],
        payload: Callable[[], dict[str, Any]],
        on_reply: Callable[[dict[str, Any]], None],
        period_s: float,
        keys: CurveKeys | None = None,
    ) -> None:
        if period_s <= 0:
            raise ValueError(f"period_s must be positive, got {period_s}")
        self._lookup = _Lookup(resolve)
        self._payload = payload
        self._on_reply = on_reply
        self._period_s = period_s
        self._keys = keys
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = -1, -1
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint = ""

    def start(self) -> None:
        self._wake_read, self._wake_write = os.pipe()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. Safe to call twice, and without ``start``."""
        self._stopping.set()
        if self._wake_write < 0:
            return
        os.write(self._wake_write, b"x")
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("heartbeat: the thread did not end in %g s (a callback hangs)", JOIN_TIMEOUT_S)
            return  # its pipe stays open: it still polls it
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_read, self._wake_write = -1, -1

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heard_at = next_beat = time.monotonic()
        self._lookup.begin()
        try:
            while not self._stopping.is_set():
                now = time.monotonic()
                if self._take_endpoint(context):
                    heard_at = next_beat = now
                if now - heard_at > SILENT_PERIODS * self._period_s:
                    heard_at = now
                    self._lookup.begin()
                if now >= next_beat:
                    next_beat = now + (self._period_s if self._beat() else min(CONNECT_POLL_S, self._period_s))
                if self._wait(max(0.0, next_beat - time.monotonic())):
                    heard_at = time.monotonic()
        except Exception:
            log.exception("heartbeat: the thread ends")
        finally:
            self._close()
            context.term()

    def _take_endpoint(self, context: zmq.Context[zmq.Socket[bytes]]) -> bool:
        """Connect to a newly resolved endpoint; True where it differs from the one in use."""
        endpoint = self._lookup.take()
        if endpoint is None or endpoint == self._endpoint:
            return False
        self._close()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, WAITING_MAX)
        socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, REPLY_BYTES_MAX)
        # Only a living connection takes messages: a scheduler that comes back must not get a row of old reports.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            connect(socket, endpoint, self._keys)
        except zmq.ZMQError as error:
            log.warning("heartbeat: cannot connect: %s", error)
            socket.close()
            return False
        self._socket, self._endpoint = socket, endpoint
        return True

    def _beat(self) -> bool:
        """Send one heartbeat. False where it cannot go out now; ``payload()`` is then not asked, for it may hand over what it
        tells only once."""
        if self._socket is None or not self._socket.poll(0, zmq.POLLOUT):
            return False
        try:
            self._socket.send(cast(bytes, msgpack.packb(self._payload())), zmq.DONTWAIT)
        except Exception:
            log.exception("heartbeat: not sent")
        return True

    def _wait(self, timeout_s: float) -> bool:
        """Wait for replies, the next beat or the stop; True where a reply came."""
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        ready = dict(poller.poll(max(1, int(timeout_s * 1000 + 0.5)) if timeout_s else 0))
        return self._socket is not None and self._socket in ready and self._read_replies(self._socket)

    def _read_replies(self, socket: zmq.Socket[bytes]) -> bool:
        heard = False
        for _ in range(REPLIES_PER_TURN_MAX):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                reply = msgpack.unpackb(frames[-1])
                if not isinstance(reply, dict):
                    raise TypeError("a reply is a map")
                heard = True
                self._on_reply(reply)
            except Exception:
                log.exception("heartbeat: reply not taken")
        return heard

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket, self._endpoint = None, ""


class _Lookup:
    """Runs ``resolve`` on a daemon thread, at most one at a time. One that hangs is left behind, never waited for."""

    def __init__(self, resolve: Callable[[], str | None]) -> None:
        self._resolve = resolve
        self._thread: threading.Thread | None = None
        self._found: str | None = None

    def begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="heartbeat-resolve", daemon=True)
            self._thread.start()

    def take(self) -> str | None:
        """The endpoint that the last lookup found, once."""
        found, self._found = self._found, None
        return found

    def _run(self) -> None:
        try:
            self._found = self._resolve()
        except Exception as error:
            log.warning("heartbeat: the scheduler was not found: %s", type(error).__name__)
