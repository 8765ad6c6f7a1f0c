"""Does the paged path compute what the model's own code computes? Asked at every load, before any request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from engine.probe.refusal import UnsupportedModelError

TOKENS: Final = 96
"""Length of the test prompt; longer where a sliding window is short enough to be passed."""
WINDOW_TOKENS_MAX: Final = 1024
"""A window longer than this is not passed by the test: its mask is covered by the unit tests only."""
DECODED: Final = 3
PIECES: Final = (33, 16, 30)
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.06, "float16": 0.02}
"""Largest difference of a logit, as a share of the logits' standard deviation at least 1. In float32 2e-7 to 3e-5 were measured over
all families; in 16 bits the two orders of summation differ by rounding that grows with depth."""

Forward = Callable[[Sequence[tuple[Sequence[int], int, int]]], torch.Tensor]
"""``[(token_ids, past, sequence number)] -> logits [len, vocab]`` on the paged path."""


def self_test(model: PreTrainedModel, name: str, dtype: str, use_eager: Callable[[], None], forward: Forward) -> float:
    """Compare the paged path with the model's eager attention over whole prompts: uneven chunks, then a ragged batch of decode steps of
    two sequences. Returns the largest difference; raises UnsupportedModelError where it is over :data:`TOLERANCE`."""
    config = model.config.get_text_config(decoder=True)
    windows = [w for w in (getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)) if w]
    length = max([TOKENS, *(w + 17 for w in windows if w <= WINDOW_TOKENS_MAX)])
    length = min(length, int(config.max_position_embeddings) - DECODED)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, config.vocab_size, (n + DECODED,), generator=generator).tolist() for n in (length, max(2, length // 3))
    ]
    paged: list[list[Any]] = [_prefill(forward, prompt, number) for number, prompt in enumerate(prompts)]
    for step in range(DECODED):
        rows = forward([([p[len(p) - DECODED + step]], len(p) - DECODED + step, i) for i, p in enumerate(prompts)])
        for i, row in enumerate(rows):
            paged[i].append((len(prompts[i]) - DECODED + step, row))
    use_eager()
    worst = 0.0
    for prompt, rows in zip(prompts, paged, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt], device=model.device)
            whole = model(input_ids=ids, use_cache=False).logits[0].float()
        scale = max(1.0, float(whole.std()))
        for position, row in rows:
            worst = max(worst, float((row - whole[position]).abs().max()) / scale)
    if not worst < TOLERANCE[dtype]:  # also true for NaN
        reason = f"the self-test found logits that differ by {worst:.2g} from the model's own attention (limit {TOLERANCE[dtype]:g})"
        raise UnsupportedModelError(name, reason)
    return worst


def _prefill(forward: Forward, prompt: list[int], number: int) -> list[Any]:
    """The prompt in uneven pieces; returns (position, logits row) at each piece's end."""
    rows: list[Any] = []
    start, end, piece = 0, len(prompt) - DECODED, 0
    while start < end:
        stop = min(end, start + PIECES[piece % len(PIECES)])
        rows.append((stop - 1, forward([(prompt[start:stop], start, number)])[0]))
        start, piece = stop, piece + 1
    return rows
