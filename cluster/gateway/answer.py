"""An answer's tokens as text: detokenised, cut at stop strings, with the log-probabilities that belong to the text.

Pure. Text is held back for two reasons: a token may end inside a character, and the last characters may begin a stop string.
Log-probabilities wait with their text, so that what the client sees always fits together::

    decoded   |================================|      all characters of the tokens pushed so far
    sent      |======================|                what the client may have
    a token's logprob goes out once ``sent`` is past the token's first character
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.serving.token_stream import TokenLogprob


class StopResult(Protocol):
    """``emit`` may go out; ``stopped``: a stop string was found, and ``emit`` ends before it."""

    @property
    def emit(self) -> str: ...
    @property
    def stopped(self) -> bool: ...


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class Stops(Protocol):
    def push(self, text: str) -> StopResult: ...
    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token of the answer with its log-probability. ``offset``: characters of the answer before it."""

    token_id: int
    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What has become known since the last part."""

    text: str
    reports: tuple[TokenReport, ...]


class AnswerText:
    """Tokens in, text out. After :attr:`stopped` or :meth:`end` nothing more may be pushed."""

    def __init__(self, detokenizer: Detokenizer, stops: Stops) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._decoded = 0
        self._sent = 0
        self._text: list[str] = []
        self._waiting: deque[TokenReport] = deque()
        self._reports: list[TokenReport] = []
        self.stopped = False

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """One more token; ``logprob`` is None where the client did not ask for it."""
        if logprob is not None:
            self._waiting.append(TokenReport(token_id, logprob, self._decoded))
        self._decode(self._detokenizer.push((token_id,)))

    def end(self) -> None:
        """The answer is complete: everything held back goes out, as it is known not to be a stop string by now."""
        if self.stopped:
            return  # the tokens that still wait begin at the stop string or after it
        self._decode(self._detokenizer.flush())
        if not self.stopped:
            self._emit(self._stops.flush())
            self._reports.extend(self._waiting)  # the last tokens may have no text of their own
            self._waiting.clear()

    def take(self) -> AnswerPart | None:
        """All that may go out and has not yet, or None."""
        if not self._text and not self._reports:
            return None
        part = AnswerPart("".join(self._text), tuple(self._reports))
        self._text.clear()
        self._reports.clear()
        return part

    def _decode(self, text: str) -> None:
        if not text:
            return
        self._decoded += len(text)
        result = self._stops.push(text)
        self._emit(result.emit)
        self.stopped = result.stopped

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._text.append(text)
        self._sent += len(text)
        while self._waiting and self._waiting[0].offset < self._sent:
            self._reports.append(self._waiting.popleft())
