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

GREEDY_BELOW: Final = 1e-5
"""A temperature so small that dividing by it may overflow is greedy."""
NUCLEUS_STEP: Final = 16.0
NUCLEUS_LEAST: Final = 1e-18
"""A nucleus is looked for among the weights down to ever smaller ones; below this share of the largest it is everything."""


class NonFiniteLogitsError(ValueError):
    """The model gave NaN, infinity, or no finite logit at all for ``rows`` (indices into the batch); the other rows are sound."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"the model produced logits that are not finite ({len(rows)} rows)")
        self.rows = tuple(rows)


@dataclass(frozen=True, slots=True)
class Drawn:
    """``logprob`` only where the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[Drawn]:
    """Draw one token per row of ``logits`` (float32 ``[n, vocab]``). ``positions[i]``: index in the answer of the token drawn.

    Greedy is argmax, one for all rows. Otherwise: softmax of ``logits / temperature`` over the ``top_k`` largest, cut to the
    smallest set whose share of that reaches ``top_p`` (ties: the smaller token id stays), then the inverse of its cumulative sum
    in token order at one uniform number, a fixed function of (seed, position). Each row by itself, so neither company in the
    batch nor a move to another worker changes a draw. A logit of -inf is never drawn. Raises :class:`NonFiniteLogitsError`.
    """
    highest, best = logits.max(dim=-1)
    finite = torch.isfinite(highest).tolist()  # a maximum hides no NaN
    if not all(finite):
        raise NonFiniteLogitsError([row for row, sound in enumerate(finite) if not sound])
    tokens: list[int] = best.tolist()
    drawing = [row for row, wish in enumerate(params) if wish.temperature >= GREEDY_BELOW]
    if drawing:  # one copy off the device for all of them
        for row, scores in zip(drawing, logits[drawing].cpu().numpy(), strict=True):
            tokens[row] = _draw(scores, params[row], positions[row])
    return [
        Drawn(token, None if wish.logprobs is None else _logprob(logits[row], token, wish.logprobs))
        for row, (token, wish, _) in enumerate(zip(tokens, params, positions, strict=True))
    ]


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the same for the same arguments on every machine (counter-based Philox)."""
    bits = np.random.Philox(key=seed, counter=position)
    return float(np.random.Generator(bits).random())


def _draw(logits: NDArray[np.float32], wish: SamplingParams, position: int) -> int:
    """One number decides: where it falls in the cumulative sum of what is left of the distribution."""
    scores = logits.astype(np.float64)
    weights = np.exp((scores - scores.max()) / wish.temperature)
    ids = _candidates(weights, wish.top_k, wish.top_p)
    cumulative = np.cumsum(weights if ids is None else weights[ids])
    total = cumulative[-1]
    chosen = int(np.searchsorted(cumulative, uniform(wish.seed, position) * total, side="right"))
    chosen = min(chosen, int(np.searchsorted(cumulative, total)))  # rounding must not reach a token without weight
    return chosen if ids is None else int(ids[chosen])


def _candidates(weights: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.intp] | None:
    """Token ids that may be drawn, ascending; None for all of them."""
    ids: NDArray[np.intp] | None = None
    if 0 < top_k < len(weights):
        ids = _largest(weights, np.partition(weights, len(weights) - top_k)[len(weights) - top_k], top_k)
    if top_p < 1.0:
        left = weights if ids is None else weights[ids]
        kept = _nucleus(left, top_p * float(left.sum()))
        ids = kept if ids is None else ids[kept]
    return ids


def _nucleus(weights: NDArray[np.float64], wanted: float) -> NDArray[np.intp]:
    """Indices, ascending, of the smallest set of weights that add up to ``wanted``."""
    least = 1.0  # the largest weight is exp(0)
    while (enough := weights[weights >= least]).sum() < wanted and least > 0:
        least = least / NUCLEUS_STEP if least > NUCLEUS_LEAST else 0.0  # sorting the whole vocabulary costs 10 ms
    descending = np.sort(enough)[::-1]
    count = min(int(np.searchsorted(np.cumsum(descending), wanted)) + 1, len(enough))
    return _largest(weights, descending[count - 1], count)


def _largest(weights: NDArray[np.float64], border: np.float64, count: int) -> NDArray[np.intp]:
    """Indices, ascending, of the ``count`` largest weights, of which ``border`` is the smallest; among ties the first stay."""
    above = np.flatnonzero(weights > border)
    ties = np.flatnonzero(weights == border)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _logprob(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Of the raw distribution (temperature 1, nothing cut), as OpenAI's API reports it. Tokens of no probability are left out."""
    logprobs = torch.log_softmax(row.float(), dim=-1)
    best: list[tuple[int, float]] = []
    if top:
        border = torch.topk(logprobs, min(top, len(logprobs))).values[-1]
        ids = torch.nonzero(
            (logprobs >= border) & torch.isfinite(logprobs)
        ).flatten()  # all that tie: topk picks among them freely
        values, order = torch.sort(logprobs[ids], descending=True, stable=True)
        best = list(zip(ids[order[:top]].tolist(), values[:top].tolist(), strict=True))
    return TokenLogprob(float(logprobs[token]), tuple(best))
