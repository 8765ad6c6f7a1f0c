"""Work done before the first request, so that it does not pay for it."""

from __future__ import annotations

from engine.engine import Engine, SequenceStep
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import sample


def warm_up(engine: Engine) -> None:
    """One whole prefill piece, one after cached tokens, and decode steps: the first request must not pay for what libraries set
    up at their first use (kernels chosen, threads started, weights paged in)."""
    size = engine.layout.block_tokens
    piece = min(engine.chunk_tokens, (engine.cache.block_count - 1) * size, engine.context_max - size)
    piece -= piece % size
    if piece <= 0:
        return
    blocks = engine.cache.allocate(piece // size + 1)
    try:
        engine.forward([SequenceStep([0] * piece, 0, blocks)])
        logits = engine.forward([SequenceStep([0] * min(size, 8), piece, blocks)])
        sample(logits, [SamplingParams(temperature=0)], [0])
        for _ in range(2):
            engine.forward([SequenceStep([0], piece, blocks)])
    finally:
        engine.cache.free(blocks)
