"""The node's side of its workers' connections. Owned by the node's I/O thread."""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kv_pool.transport import process
from kv_pool.transport.local import HungUpError, LocalConnection, LocalListener

ACCEPTS_PER_TURN_MAX: Final = 16
MESSAGES_PER_TURN_MAX: Final = 256
CONNECTIONS_MAX: Final = 4096
NAME_PREFIX: Final = "local-"


class Worker(NamedTuple):
    """Who a connection belongs to, by the kernel's word."""

    pid: int
    started: int


class LocalClients:
    """Connections by client name (``local-1`` ...). :attr:`fd` is readable when :meth:`receive` has something to do."""

    def __init__(self, name: str) -> None:
        self._listener = LocalListener(name)
        self.endpoint = self._listener.endpoint
        self._numbers = itertools.count(1)
        self._connections: dict[str, LocalConnection] = {}
        self._workers: dict[str, Worker] = {}
        self._name_of: dict[int, str] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    @property
    def fd(self) -> int:
        return self._epoll.fileno()

    def look_out(self, seconds: float) -> bool:
        """Whether there is something to receive now, or within ``seconds``, without going to sleep."""
        until = time.perf_counter() + seconds
        while not self._epoll.poll(0, 1):
            if time.perf_counter() >= until:
                return False
        return True

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, name: str) -> bool:
        return name in self._connections

    def worker(self, name: str) -> Worker:
        return self._workers[name]

    def receive(self) -> Iterator[tuple[str, memoryview | None]]:
        """(client, message) in order of each client, at most ``MESSAGES_PER_TURN_MAX`` of each; None for one that has hung up,
        which is forgotten then. A message is valid until the next one is taken."""
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
                continue
            name = self._name_of.get(fd)
            if name is not None:
                yield from self._receive_from(name, events)

    def send(self, name: str, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """False where the client is gone or takes nothing more; it is forgotten then."""
        connection = self._connections.get(name)
        if connection is None:
            return False
        try:
            connection.send(message, descriptors)
        except (HungUpError, ValueError):  # or the message is too long: this client cannot be served
            self.drop(name)
            return False
        if connection.backlogged:
            self._epoll.modify(connection, select.EPOLLIN | select.EPOLLOUT)
        return True

    def drop(self, name: str) -> None:
        """Hang up. Unknown names are ignored."""
        connection = self._connections.pop(name, None)
        if connection is not None:
            del self._name_of[connection.fileno()]
            del self._workers[name]
            self._epoll.unregister(connection)
            connection.close()

    def close(self) -> None:
        for name in list(self._connections):
            self.drop(name)
        self._listener.close()
        self._epoll.close()

    def _accept(self) -> None:
        for connection in self._listener.accept(ACCEPTS_PER_TURN_MAX):
            if len(self._connections) >= CONNECTIONS_MAX:
                connection.close()
                continue
            name = f"{NAME_PREFIX}{next(self._numbers)}"
            self._connections[name] = connection
            self._workers[name] = Worker(connection.pid, process.started(connection.pid))
            self._name_of[connection.fileno()] = name
            self._epoll.register(connection, select.EPOLLIN)

    def _receive_from(self, name: str, events: int) -> Iterator[tuple[str, memoryview | None]]:
        try:
            if events & select.EPOLLOUT:
                connection = self._connections[name]
                connection.flush()
                if not connection.backlogged:
                    self._epoll.modify(connection, select.EPOLLIN)
            for _ in range(MESSAGES_PER_TURN_MAX):
                connection = self._connections.get(name)
                message = None if connection is None else connection.receive()
                if message is None:
                    return
                yield name, message
        except HungUpError:
            self.drop(name)
            yield name, None
