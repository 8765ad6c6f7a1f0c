"""How a block travels from node to node: cut into pieces, each a message of its own, in order.

::

    Granted(ticket, one grant) + bytes 0 .. PIECE_BYTES
    Piece(ticket, lease, offset) + the next PIECE_BYTES, until the block's length is reached

A piece is copied into its slot and hashed there while it is in the processor's cache, and the next ones travel meanwhile. A whole
block in one message is received in full before its first byte is copied (docs/decisions/0008-transport.md has the figures).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

from kv_pool.node.messages import Grant, Granted, Piece

PIECE_BYTES: Final = 512 * 1024


def pieces_of(length: int) -> int:
    """Messages that a block of ``length`` bytes takes; one of no bytes takes one."""
    return max(1, -(-length // PIECE_BYTES))


def cut(answer: Granted, payload: memoryview) -> Iterator[tuple[Granted | Piece, memoryview]]:
    """The messages that carry the one block of ``answer``, each with its bytes. Nothing is copied."""
    (grant,) = answer.grants()
    for offset in range(0, max(1, len(payload)), PIECE_BYTES):
        header = Piece(answer.ticket, grant.lease, offset) if offset else answer
        yield header, payload[offset : offset + PIECE_BYTES]


class Landing:
    """The receiver's side of one block: what has come of it, and where it goes. Until :meth:`into` names a slot, nowhere: bytes
    that nobody wants are received and forgotten."""

    __slots__ = ("_digest", "_target", "fetch", "filled", "grant", "slot")

    def __init__(self, fetch: int, grant: Grant) -> None:
        self.fetch = fetch
        self.grant = grant
        self.slot: int | None = None
        self.filled = 0
        self._target = memoryview(b"")
        self._digest = xxhash.xxh3_64()

    def into(self, slot: int, target: memoryview) -> None:
        self.slot, self._target = slot, target[: self.grant.length]

    def into_nowhere(self) -> None:
        """The slot is no longer to be touched."""
        self.slot, self._target = None, memoryview(b"")

    @property
    def expected(self) -> int:
        """Length of the next piece."""
        return min(PIECE_BYTES, self.grant.length - self.filled)

    @property
    def complete(self) -> bool:
        return self.filled == self.grant.length

    def room(self) -> memoryview:
        """Where the next piece belongs: ``expected`` bytes, or none where nobody wants the block."""
        return self._target[self.filled : self.filled + self.expected]

    def take(self) -> int:
        """The next piece is in its room: count it, hash it where it lies. Returns its length."""
        size = self.expected
        if self.slot is not None:
            self._digest.update(self.room())
        self.filled += size
        return size

    @property
    def sound(self) -> bool:
        """Whether the whole block is in its slot, with the checksum that its writer computed."""
        return self.slot is not None and self.complete and self._digest.intdigest() == self.grant.checksum
