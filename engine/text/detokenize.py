"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.text.codec import TextCodec

REPLACEMENT: Final = "\ufffd"
PENDING_MAX: Final = 16
"""Tokens held back for a character that does not complete. No character takes more bytes than 4, a few tokens at most; after
that the
bytes are not text and are given out as the decoder shows them."""


class IncrementalDetokenizer:
    """``"".join(push(...) for ...) + flush()`` equals decoding all tokens at once after ``prompt_ids``.

    A tokenizer's decoder may change the text of a token by what stands before it (a leading space, the bytes of one character
    over several tokens). So the text of new tokens is the difference of decoding a window with and without them; the window
    starts at the tokens of the last complete piece, which bounds the work per token.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = list(prompt_ids)
        self._shown = codec.decode(self._window)
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Text that ``ids`` complete; empty while a character is still open."""
        out: list[str] = []
        for token in ids:
            self._pending.append(token)
            text = self._codec.decode([*self._window, *self._pending])
            fresh = text[len(self._shown) :]
            if text.endswith(REPLACEMENT) and len(self._pending) < PENDING_MAX:
                continue
            out.append(fresh)
            self._advance()
        return "".join(out)

    def flush(self) -> str:
        """What is still held back: at the end of an answer an open character is shown as the decoder shows it."""
        if not self._pending:
            return ""
        fresh = self._codec.decode([*self._window, *self._pending])[len(self._shown) :]
        self._advance()
        return fresh

    def _advance(self) -> None:
        """The pending tokens become the window, unless they have no text of their own (then what stood before them still
        matters)."""
        candidate = self._codec.decode(self._pending)
        if candidate:
            self._window, self._shown = self._pending, candidate
        else:
            self._window = [*self._window, *self._pending][-PENDING_MAX:]
            self._shown = self._codec.decode(self._window)
        self._pending = []
