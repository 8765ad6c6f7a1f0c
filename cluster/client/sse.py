"""Server-sent events out of bytes that arrive in any pieces. Pure; only what the API uses of the format (``data:`` fields)."""

from __future__ import annotations

from typing import Final

from cluster.client.errors import ProtocolError

EVENT_BYTES_MAX: Final = 8 * 1024 * 1024


class EventReader:
    """``push`` bytes, get the data of each event that they complete. Lines end in LF, CRLF or CR."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False

    def push(self, chunk: bytes) -> list[str]:
        """Raises :class:`ProtocolError` on an event that is too long or not UTF-8."""
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]  # the second half of a CRLF that was torn apart
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk[-1:] == b"\r"
        # Only the new part can hold a line end, so a long line is not searched again with each piece of it.
        *ended, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events: list[str] = []
        for line in ended:
            event = self._line(bytes(self._rest) + line)
            self._rest.clear()
            if event is not None:
                events.append(event)
        self._rest += rest
        if len(self._rest) + self._size > EVENT_BYTES_MAX:
            raise ProtocolError(f"an event of the stream is longer than {EVENT_BYTES_MAX} bytes")
        return events

    def _line(self, line: bytes) -> str | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(value)
            return None
        if not self._data:
            return None
        data, self._data, self._size = b"\n".join(self._data), [], 0
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ProtocolError("an event of the stream is not UTF-8") from None
