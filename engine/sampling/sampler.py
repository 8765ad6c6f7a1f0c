"""The next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling.params import SamplingParams
from engine.serving.token_stream import TokenLogprob


class NonFiniteLogitsError(ValueError):
    """The model gave NaN, or no finite logit: nothing can be drawn."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """``logprob`` only where the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[Drawn]:
    """Draw one token per row of ``logits`` (float32 ``[n, vocab]``). ``positions[i]`` is the index in the answer of the token
    drawn.

    Row by row, so company never changes a draw. Greedy is argmax. Otherwise: softmax of ``logits / temperature`` over the
    ``top_k`` largest,
    cut to the smallest set whose probability reaches ``top_p``, then the inverse of its cumulative sum (largest first, ties by
    token id) at
    one uniform number, a fixed function of (seed, position) by counter-based Philox. So an answer goes on alike on any worker.
    Raises :class:`NonFiniteLogitsError`.
    """
    highest, best = logits.max(dim=-1)
    if not bool(torch.isfinite(highest).all()):
        raise NonFiniteLogitsError("the model produced logits that are not finite")
    greedy = best.tolist()
    drawn: list[Drawn] = []
    for row, (wish, position) in enumerate(zip(params, positions, strict=True)):
        token = greedy[row] if wish.temperature == 0 else _draw(logits[row], wish, position)
        logprob = None if wish.logprobs is None else _logprob(logits[row], token, wish.logprobs)
        drawn.append(Drawn(token, logprob))
    return drawn


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the same for the same arguments on every machine."""
    bits = np.random.Philox(key=seed, counter=position)
    return float(np.random.Generator(bits).random())


def _draw(row: torch.Tensor, wish: SamplingParams, position: int) -> int:
    scores = row.double().cpu().numpy() / wish.temperature
    order = np.lexsort((np.arange(len(scores)), -scores))  # largest first, ties by token id
    if wish.top_k:
        order = order[: wish.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    cumulative = np.cumsum(weights)
    if wish.top_p < 1.0:
        keep = int(np.searchsorted(cumulative, wish.top_p * cumulative[-1], side="left")) + 1
        order, cumulative = order[:keep], cumulative[:keep]
    chosen = int(np.searchsorted(cumulative, uniform(wish.seed, position) * cumulative[-1], side="right"))
    return int(order[min(chosen, len(order) - 1)])


def _logprob(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Of the raw distribution (temperature 1, nothing cut), as OpenAI's API reports it."""
    logprobs = torch.log_softmax(row.float(), dim=-1)
    values, ids = torch.topk(logprobs, top) if top else (logprobs[:0], logprobs[:0].long())
    best = tuple((int(i), float(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logprobs[token]), best)
