"""Answers and stream chunks in OpenAI's form, as plain dictionaries. One shape per endpoint, the same methods on both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cluster.gateway.answer import AnswerPart, TokenReport

DONE: Final = b"data: [DONE]\n\n"

LOGPROB_MIN: Final = -9999.0
"""OpenAI's figure for 'practically impossible'; JSON has no minus infinity."""

TokenName = Callable[[int], str]
"""Text of one token alone."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole HTTP request: each prompt counted once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_wire(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished choice. ``reports`` is None where no log-probabilities were asked for."""

    index: int
    text: str
    finish_reason: str
    reports: tuple[TokenReport, ...] | None


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one response carries. ``usage_in_chunks``: the client asked for usage at the end of the stream, and
    every chunk before it says ``"usage": null``."""

    response_id: str
    created: int
    model: str
    fingerprint: str
    usage_in_chunks: bool = False

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        }  # fmt: skip

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.wrap(kind, choices) | ({"usage": None} if self.usage_in_chunks else {})


class Shape(Protocol):
    """How one endpoint words an answer."""

    @property
    def envelope(self) -> Envelope: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first text, where there is one."""
        ...

    def part(self, index: int, part: AnswerPart) -> dict[str, Any]: ...
    def ending(self, index: int, finish_reason: str) -> dict[str, Any]: ...
    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, with no choices."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    """``/v1/chat/completions``."""

    envelope: Envelope
    logprobs: bool
    name: TokenName

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def part(self, index: int, part: AnswerPart) -> dict[str, Any]:
        return self._chunk(index, {"content": part.text}, self._logprobs(part.reports), None)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(index, {}, None, finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self.envelope.wrap("chat.completion.chunk", []) | {"usage": usage.to_wire()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        rows = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.reports),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return self.envelope.wrap("chat.completion", rows) | {"usage": usage.to_wire()}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.envelope.chunk("chat.completion.chunk", [choice])

    def _logprobs(self, reports: Sequence[TokenReport] | None) -> dict[str, Any] | None:
        if not self.logprobs or reports is None:
            return None
        content = [
            self._token(report.token_id, report.logprob.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in report.logprob.top]}
            for report in reports
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.name(token_id)
        # Part of a character has no text of its own, and the bytes behind a replacement character are not known here.
        return {"token": text, "logprob": max(LOGPROB_MIN, logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """``/v1/completions``."""

    envelope: Envelope
    logprobs: bool
    name: TokenName

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def part(self, index: int, part: AnswerPart) -> dict[str, Any]:
        return self.envelope.chunk("text_completion", [self._choice(index, part.text, part.reports, None)])

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self.envelope.chunk("text_completion", [self._choice(index, "", None, finish_reason)])

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self.envelope.wrap("text_completion", []) | {"usage": usage.to_wire()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        rows = [self._choice(c.index, c.text, c.reports, c.finish_reason) for c in choices]
        return self.envelope.wrap("text_completion", rows) | {"usage": usage.to_wire()}

    def _choice(self, index: int, text: str, reports: Sequence[TokenReport] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(reports), "finish_reason": finish_reason}

    def _logprobs(self, reports: Sequence[TokenReport] | None) -> dict[str, Any] | None:
        if not self.logprobs or reports is None:
            return None
        return {
            "tokens": [self.name(report.token_id) for report in reports],
            "token_logprobs": [max(LOGPROB_MIN, report.logprob.logprob) for report in reports],
            "top_logprobs": [self._top(report) for report in reports],
            "text_offset": [report.offset for report in reports],
        }

    def _top(self, report: TokenReport) -> dict[str, float]:
        """The alternatives, and the drawn token even where it is not among them."""
        drawn = (report.token_id, report.logprob.logprob)
        return {self.name(token_id): max(LOGPROB_MIN, logprob) for token_id, logprob in (*report.logprob.top, drawn)}


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "moonpool"}
