"""What workers tell a gateway about its requests: tokens, ends, failures, and where the time went.

One frame per engine step and gateway carries all of that step's events: ``msgpack([sender, [event, ...]])``, never one
message per token. Events name (request, attempt): the gateway drops those of an attempt it has given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgpack

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
EVENTS_PER_FRAME_MAX: Final = 8192


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token
    LENGTH = "length"  # max_new_tokens reached


class FailureCause(StrEnum):
    """Why an attempt ended without an answer. The gateway plans again after every one of them but DEADLINE and
    TOO_SLOW."""

    HANDOFF = "handoff"  # the blocks did not arrive in time, or were not what was promised
    PREEMPTED = "preempted"  # the decode cache was full: the youngest sequence gives way, its blocks are in the pool
    REFUSED = "refused"  # queue full, or the worker is draining or fenced
    DEADLINE = "deadline"  # the request's own time is over
    TOO_SLOW = "too_slow"  # the decode worker cannot keep the time per token that was asked for: nobody's fault, no other try
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the token drawn, and the ``top`` alternatives as (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """``token_ids`` are the answer's tokens ``index .. index + len - 1``, counted from the first answer token ever."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    attempt: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    attempt: int
    cause: FailureCause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Sent with the first token. Token counts by where the cached prefix came from; seconds of each phase."""

    request_id: str
    attempt: int
    prompt_tokens: int
    device_tokens: int
    dram_tokens: int
    ssd_tokens: int
    remote_tokens: int
    queue_s: float
    load_s: float
    compute_s: float

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.dram_tokens + self.ssd_tokens + self.remote_tokens


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """Sent with the decode worker's first token: ``handoff_s`` is end of prefill compute to start of the first decode step
    (wall clocks of one machine or of machines in step; it is a report, nothing depends on it)."""

    request_id: str
    attempt: int
    handoff_s: float


Event = Tokens | Finished | Failed | PrefillDone | DecodeStarted


class MalformedFrameError(ValueError):
    """A token frame that is not what this module writes."""


def encode(sender: str, events: list[Event]) -> bytes:
    """One frame. ``sender`` is ``worker_id:incarnation``."""
    frame = msgpack.packb([sender, [_pack(event) for event in events]])
    assert frame is not None
    return frame


def decode(frame: bytes) -> tuple[str, list[Event]]:
    """Inverse of :func:`encode`. Raises :class:`MalformedFrameError` on anything else; never allocates beyond the frame."""
    if len(frame) > FRAME_BYTES_MAX:
        raise MalformedFrameError(f"token frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
    try:
        sender, rows = msgpack.unpackb(frame, max_array_len=max(EVENTS_PER_FRAME_MAX, len(frame)))
        if not isinstance(sender, str) or len(rows) > EVENTS_PER_FRAME_MAX:
            raise MalformedFrameError("token frame with a bad sender or too many events")
        return sender, [_unpack(row) for row in rows]
    except MalformedFrameError:
        raise
    except Exception as error:
        raise MalformedFrameError(f"malformed token frame: {type(error).__name__}") from error


def _pack(event: Event) -> list[Any]:
    match event:
        case Tokens():
            logprobs = None if event.logprobs is None else [[p.logprob, [list(t) for t in p.top]] for p in event.logprobs]
            return ["t", event.request_id, event.attempt, event.index, list(event.token_ids), logprobs]
        case Finished():
            return ["f", event.request_id, event.attempt, event.reason.value]
        case Failed():
            return ["x", event.request_id, event.attempt, event.cause.value, event.detail[:500]]
        case PrefillDone():
            return [
                "p", event.request_id, event.attempt, event.prompt_tokens, event.device_tokens, event.dram_tokens,
                event.ssd_tokens, event.remote_tokens, event.queue_s, event.load_s, event.compute_s,
            ]  # fmt: skip
        case DecodeStarted():
            return ["d", event.request_id, event.attempt, event.handoff_s]


def _unpack(row: list[Any]) -> Event:
    kind, request_id, attempt = str(row[0]), str(row[1]), int(row[2])
    rest = row[3:]
    match kind:
        case "t":
            index, ids, logprobs = rest
            unpacked = None
            if logprobs is not None:
                unpacked = tuple(TokenLogprob(float(p[0]), tuple((int(t[0]), float(t[1])) for t in p[1])) for p in logprobs)
            return Tokens(request_id, attempt, int(index), tuple(int(i) for i in ids), unpacked)
        case "f":
            return Finished(request_id, attempt, FinishReason(rest[0]))
        case "x":
            return Failed(request_id, attempt, FailureCause(rest[0]), str(rest[1]))
        case "p":
            counts, seconds = [int(v) for v in rest[:5]], [float(v) for v in rest[5:8]]
            return PrefillDone(request_id, attempt, *counts, *seconds)
        case "d":
            return DecodeStarted(request_id, attempt, float(rest[0]))
        case _:
            raise MalformedFrameError(f"unknown event kind {kind!r}")
