"""One question and its answer, with what the client saw of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.client.blocking import Client
from cluster.client.replies import Reply
from cluster.demo.script import Conversation

OnPiece = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """``gap_s_max`` is the longest silence between two pieces of text; times as the client saw them, in seconds."""

    label: str
    reply: Reply
    ttft_s: float
    tbt_s: float | None
    gap_s_max: float

    @property
    def tiers(self) -> Mapping[str, int]:
        return self.reply.details.cached_by_tier if self.reply.details is not None else {}

    @property
    def attempts(self) -> int:
        return self.reply.details.attempts if self.reply.details is not None else 0


def ask(client: Client, label: str, conversation: Conversation, *, max_tokens: int, on_piece: OnPiece, **options: Any) -> Turn:
    """Stream one greedy answer. Raises :class:`~cluster.client.errors.MoonpoolError`."""
    gap_s_max, last_at = 0.0, None
    with client.stream_chat(conversation, details=True, max_tokens=max_tokens, temperature=0, **options) as stream:
        for piece in stream:
            came_at = stream.timing.last_at
            assert came_at is not None
            gap_s_max = max(gap_s_max, came_at - last_at) if last_at is not None else 0.0
            last_at = came_at
            on_piece(piece)
        reply = stream.reply()
    tokens = reply.usage.completion_tokens
    return Turn(label, reply, stream.timing.ttft_s or 0.0, stream.timing.tbt_s(tokens), gap_s_max)
