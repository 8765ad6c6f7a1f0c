"""The control path between a node and the workers of its machine: messages over a Unix socket (``SOCK_SEQPACKET``).

No bytes of blocks go this way, they are in shared memory. Chosen over zmq because a round trip takes half the time, the kernel
says who the other side is (``SO_PEERCRED``), a dead process hangs up at once, and the arena's descriptor can travel with the
welcome (docs/decisions/0008-transport.md).

The address is abstract (``unix:@name``, unix(7)): nothing is left in any folder. Only processes of the same user are let in.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

MESSAGE_BYTES_MAX: Final = 256 * 1024
BUFFER_BYTES: Final = 1024 * 1024
"""Asked of the kernel, which gives what its own limit allows (net.core.wmem_max, twice that of its bookkeeping)."""
UNSENT_MESSAGES_MAX: Final = 1024
UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024
ACCEPT_BACKLOG: Final = 128
CREDENTIALS: Final = struct.Struct("3i")
PREFIX: Final = "unix:@"
BUSY: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS})


class HungUpError(Exception):
    """The other side is gone, or takes nothing more."""


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return made


class LocalConnection:
    """One end. Nothing here blocks. Messages leave in order; what the kernel does not take at once waits here, up to
    ``UNSENT_MESSAGES_MAX`` and ``UNSENT_BYTES_MAX``."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._buffer = bytearray(MESSAGE_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._unsent_bytes = 0
        self.pid, self.uid, _ = CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))

    @classmethod
    def connect(cls, endpoint: str) -> LocalConnection:
        """Raises OSError where nobody listens there, or somebody of another user does."""
        made = _socket()
        try:
            made.connect("\0" + endpoint.removeprefix(PREFIX))
            connection = cls(made)
            if connection.uid != os.geteuid():
                raise PermissionError(errno.EPERM, "the pool node belongs to another user")
            return connection
        except BaseException:
            made.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def backlogged(self) -> bool:
        """Messages wait to be sent: call :meth:`flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises :class:`HungUpError`. ``descriptors`` (file descriptors) travel along, and stay the caller's, who keeps them
        open. Raises ValueError for a message over ``MESSAGE_BYTES_MAX``."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {len(message)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
        if self._unsent or not self._send(message, descriptors):
            if len(self._unsent) >= UNSENT_MESSAGES_MAX or self._unsent_bytes + len(message) > UNSENT_BYTES_MAX:
                raise HungUpError("it takes no more messages")
            self._unsent.append((message, tuple(descriptors)))
            self._unsent_bytes += len(message)

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it. Raises :class:`HungUpError`."""
        while self._unsent and self._send(*self._unsent[0]):
            message, _ = self._unsent.popleft()
            self._unsent_bytes -= len(message)

    def receive(self) -> memoryview | None:
        """The next message, valid until the next call; None where there is none yet. Raises :class:`HungUpError`."""
        try:
            size, _, flags, _ = self._socket.recvmsg_into([self._buffer])
        except BlockingIOError:
            return None
        except OSError as error:
            raise HungUpError(error.strerror) from error
        if not size:
            raise HungUpError("it has closed the connection")
        if flags & socket.MSG_TRUNC:
            raise HungUpError("it sends messages over the limit")
        return self._view[:size]

    def receive_with_descriptor(self) -> tuple[bytes, int | None] | None:
        """As :meth:`receive`, with the one descriptor that came along, or None. It is the caller's to close."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise HungUpError(error.strerror) from error
        if not message:
            raise HungUpError("it has closed the connection")
        return message, descriptors[0] if descriptors else None

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """False where the kernel takes nothing now."""
        try:
            if descriptors:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                self._socket.sendmsg([message], rights)
            else:
                self._socket.send(message)
        except OSError as error:
            if error.errno not in BUSY:
                raise HungUpError(error.strerror) from error
            return False
        return True


class LocalListener:
    """Where a node lets the workers of its machine in. ``name`` must be one that nobody else uses."""

    def __init__(self, name: str) -> None:
        self.endpoint = PREFIX + name
        self._socket = _socket()
        try:
            self._socket.bind("\0" + name)
            self._socket.listen(ACCEPT_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, most: int) -> Iterator[LocalConnection]:
        """Those that have knocked, at most ``most``; processes of other users are sent away."""
        for _ in range(most):
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # nobody, or gone again, or no descriptor left: it will knock again
                return
            try:
                connection = LocalConnection(accepted)
            except OSError:
                accepted.close()
                continue
            if connection.uid == os.geteuid():
                yield connection
            else:
                connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
