"""Prefill and greedy decode of sequences through an engine, as the two workers would do it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.engine import Engine, SequenceStep


def prefill(
    engine: Engine, ids: Sequence[int], blocks: Sequence[int], *, cached: int = 0, borders: Sequence[int] | None = None
) -> Tensor:
    """Logits ``[vocab]`` after the last of ``ids``; the first ``cached`` are in ``blocks`` already. Pieces end at ``borders``, by
    default at the multiples of chunk_tokens."""
    ends = [end for end in (borders or range(engine.chunk_tokens, len(ids), engine.chunk_tokens)) if cached < end < len(ids)]
    logits = torch.empty(0)
    past = cached
    for end in (*ends, len(ids)):
        logits = engine.forward([SequenceStep(ids[past:end], past, blocks)])[0]
        past = end
    return logits


def decode(engine: Engine, sequences: list[list[int]], tables: Sequence[Sequence[int]], tokens: int) -> list[Tensor]:
    """Append ``tokens`` greedy tokens to each sequence, whose last token's K/V is not in the cache yet. Logits of each step,
    ``[sequences, vocab]``."""
    steps = []
    for _ in range(tokens):
        batch = [SequenceStep(ids[-1:], len(ids) - 1, table) for ids, table in zip(sequences, tables, strict=True)]
        logits = engine.forward(batch)
        for ids, row in zip(sequences, logits, strict=True):
            ids.append(int(row.argmax()))
        steps.append(logits)
    return steps


def blocks_for(engine: Engine, tokens: int) -> int:
    return -(-tokens // engine.layout.block_tokens)


def random_prompt(length: int, vocabulary: int, seed: int) -> list[int]:
    return torch.randint(2, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
