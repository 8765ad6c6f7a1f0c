"""What the demo promises, held against what happened. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from cluster.demo.turn import Turn

CACHED_SHARE_MIN: Final = 0.85
"""Of a later question's prompt: all but the question itself and what is left of its first block (or chunk)."""
WARM_RATIO_MAX: Final = 0.5
"""Warm over cold time to first token. What it usually is stands in docs/benchmarks.md; this only tells working from broken."""


@dataclass(frozen=True, slots=True)
class Promise:
    text: str
    kept: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Kill:
    """A decode worker killed while it answered. ``worker_id`` is empty where none could be seen at work."""

    worker_id: str
    pid: int
    pieces_before: int


def warm_ratio(turns: Sequence[Turn]) -> float:
    """Median time to first token of all turns but the first, over the first's."""
    return median(turn.ttft_s for turn in turns[1:]) / turns[0].ttft_s


def of_document(turns: Sequence[Turn]) -> list[Promise]:
    """The first question computes the document, the others find it."""
    answered = sum(bool(turn.reply.text.strip()) for turn in turns)
    cold = turns[0].reply.usage
    share = min(turn.reply.usage.cached_tokens / turn.reply.usage.prompt_tokens for turn in turns[1:])
    ratio = warm_ratio(turns)
    return [
        Promise("every question was answered", answered == len(turns), f"{answered} of {len(turns)}"),
        Promise("the first question was cold", cold.cached_tokens == 0, f"{cold.cached_tokens} of {cold.prompt_tokens} cached"),
        Promise("the others found the document cached", share >= CACHED_SHARE_MIN, f"at least {share:.0%} of each prompt"),
        Promise("and so their answers began sooner", ratio <= WARM_RATIO_MAX, f"TTFT warm / cold {ratio:.2f}"),
    ]


def of_chat(first: Turn, second: Turn, *, unit_tokens: int) -> Promise:
    """The second turn finds at least the first one's prompt, in whole units (blocks, or chunks under ``reuse: bitwise``)."""
    expected = first.reply.usage.prompt_tokens // unit_tokens * unit_tokens
    cached = second.reply.usage.cached_tokens
    of_answer = max(0, cached - first.reply.usage.prompt_tokens)
    detail = f"{cached} tokens cached; the first prompt had {first.reply.usage.prompt_tokens}"
    if of_answer:
        detail += f", so {of_answer} of them come from its answer"
    if not expected:
        detail += f" (less than one unit of {unit_tokens})"
    return Promise("the second turn of the chat found its first", cached >= expected, detail)


def of_kill(undisturbed: Turn, disturbed: Turn, kill: Kill | None, *, exact: bool) -> list[Promise]:
    """``exact``: the dtype promises equal tokens (float32)."""
    same = undisturbed.reply.text == disturbed.reply.text
    hit = kill is not None and bool(kill.worker_id) and disturbed.attempts > 1
    where = f"{kill.worker_id} (pid {kill.pid}) after {kill.pieces_before} pieces" if kill is not None else "nobody was killed"
    promises = [
        Promise("a decode worker was killed in the middle of its answer", hit, f"{where}; {disturbed.attempts} attempts"),
        Promise(
            "the answer finished all the same",
            disturbed.reply.finish_reason == undisturbed.reply.finish_reason,
            f"{disturbed.reply.usage.completion_tokens} tokens, longest silence {disturbed.gap_s_max:.2f} s",
        ),
    ]
    if exact:
        detail = f"{len(disturbed.reply.text)} characters" + ("" if same else ", not the same")
        promises.append(Promise("and is the same, to the letter, as without the kill", same, detail))
    return promises
