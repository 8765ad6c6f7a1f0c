"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.text.codec import TextCodec

REPLACEMENT: Final = "\ufffd"
CHARACTER_TOKENS_MAX: Final = 4
"""A character is at most 4 bytes of UTF-8, so at most 4 tokens."""
WINDOW_MAX: Final = 16
"""Most tokens kept for the next decoding. Only bytes that are not text, or tokens without text, get there."""


class IncrementalDetokenizer:
    """``"".join(push(...) for ...) + flush()`` equals the text that the answer adds to the prompt when both are decoded at once.

    A decoder may change the text of a token by what stands before it (a leading space, the bytes of one character over several
    tokens). So what is new is the difference of a window's text to what of it is out already; the window begins at the last
    complete piece, which bounds the work per token. (tokenizers' own DecodeStream has no flush and fails on bytes that are not
    text.) Bytes that are not text come out as U+FFFD; where a decoder turns a whole run of bytes into U+FFFD because of one bad
    byte (byte fallback), characters of the run that are out already stay as they were.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = list(prompt_ids[-WINDOW_MAX:])
        """Tokens that are decoded together; the first ``_settled`` of them belong to complete pieces."""
        self._settled = len(self._window)
        self._out = codec.decode(self._window)
        """What of the window's text is out."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that ``ids`` complete; empty while a character is still open."""
        return "".join(self._push(token) for token in ids)

    def flush(self) -> str:
        """What is still held back: at the end of an answer an open character is shown as the decoder shows it."""
        fresh = self._fresh(self._codec.decode(self._window))
        self._settle()
        return fresh

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._codec.decode(self._window)
        if not text.endswith(REPLACEMENT):
            fresh = self._fresh(text)
            self._settle()
            return fresh
        if len(self._window) - self._settled < WINDOW_MAX:
            return ""
        # Long past any character: these bytes are not text. Only the last mark may still become a character.
        fresh = self._fresh(text)[:-1]
        self._window = self._window[-CHARACTER_TOKENS_MAX:]
        self._settled = 0
        self._out = self._codec.decode(self._window)[:-1]
        return fresh

    def _fresh(self, text: str) -> str:
        if text.startswith(self._out):
            return text[len(self._out) :]
        return self._codec.decode(self._window[self._settled :])  # a bad byte changed the text before it (byte fallback)

    def _settle(self) -> None:
        """What is new becomes the window, unless it has no text of its own: then what stood before it still matters."""
        latest = self._window[self._settled :]
        text = self._codec.decode(latest)
        if not text:
            latest = self._window[-WINDOW_MAX:]
            text = self._codec.decode(latest)
        self._window, self._settled, self._out = latest, len(latest), text
