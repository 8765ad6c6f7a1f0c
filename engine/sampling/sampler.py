"""The next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.params import SamplingParams
from engine.serving.token_stream import TokenLogprob

NUCLEUS_FIRST_LOOK: Final = 512
"""Tokens looked at first for a nucleus: sorting a whole vocabulary costs more than a small model's step."""


GREEDY_BELOW: Final = 1e-5
"""A temperature so small that dividing by it may overflow is greedy."""


class NonFiniteLogitsError(ValueError):
    """The model gave NaN or infinity: nothing can be drawn for ``rows``. The others are fine."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"the model produced logits that are not finite ({len(rows)} rows)")
        self.rows = tuple(rows)


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
    cut to the smallest set whose share of that reaches ``top_p``, then the inverse of its cumulative sum (largest first, ties by
    token id) at
    one uniform number, a fixed function of (seed, position) by counter-based Philox. So an answer goes on alike on any worker.
    Raises :class:`NonFiniteLogitsError`.
    """
    highest, best = logits.max(dim=-1)
    finite = torch.isfinite(highest)
    if not bool(finite.all()):
        raise NonFiniteLogitsError((~finite).nonzero().flatten().tolist())
    greedy = best.tolist()
    drawn: list[Drawn] = []
    for row, (wish, position) in enumerate(zip(params, positions, strict=True)):
        token = greedy[row] if wish.temperature < GREEDY_BELOW else _draw(logits[row], wish, position)
        logprob = None if wish.logprobs is None else _logprob(logits[row], token, wish.logprobs)
        drawn.append(Drawn(token, logprob))
    return drawn


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the same for the same arguments on every machine."""
    bits = np.random.Philox(key=seed, counter=position)
    return float(np.random.Generator(bits).random())


def _draw(row: torch.Tensor, wish: SamplingParams, position: int) -> int:
    """One number decides: where it falls in the cumulative sum of what is left of the distribution."""
    ids, weights = _candidates(row, wish)
    cumulative = np.cumsum(weights)
    chosen = int(np.searchsorted(cumulative, uniform(wish.seed, position) * cumulative[-1], side="right"))
    return int(ids[min(chosen, len(ids) - 1)])


def _candidates(row: torch.Tensor, wish: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that may be drawn and their weights (not normalised), in an order that depends on the row alone."""
    scores = row.double().cpu().numpy() / wish.temperature
    weights = np.exp(scores - scores.max())
    ids = np.arange(len(weights))
    if wish.top_k and wish.top_k < len(ids):
        ids = _largest(weights, wish.top_k)
    if wish.top_p < 1.0:
        wanted = wish.top_p * float(weights[ids].sum())
        best = _largest(weights, min(len(ids), NUCLEUS_FIRST_LOOK), among=ids)
        if float(weights[best].sum()) < wanted:  # a flat distribution: its nucleus is larger than the first look
            best = _largest(weights, len(ids), among=ids)
        keep = int(np.searchsorted(np.cumsum(weights[best]), wanted, side="left")) + 1
        ids = best[:keep]
    return ids, weights[ids]


def _largest(weights: NDArray[np.float64], count: int, among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """The ``count`` ids of largest weight, largest first, ties by id."""
    ids = np.arange(len(weights)) if among is None else np.sort(among)
    if count < len(ids):
        # Everything at least as large as the count-th is a candidate: a partition alone would pick among ties at random.
        border = np.partition(weights[ids], len(ids) - count)[len(ids) - count]
        ids = ids[weights[ids] >= border]
    return ids[np.argsort(-weights[ids], kind="stable")][:count]


def _logprob(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Of the raw distribution (temperature 1, nothing cut), as OpenAI's API reports it."""
    logprobs = torch.log_softmax(row.float(), dim=-1)
    values, ids = torch.topk(logprobs, top) if top else (logprobs[:0], logprobs[:0].long())
    best = tuple((int(i), float(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logprobs[token]), best)
