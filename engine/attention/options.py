"""What a layer's attention is, besides its shapes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionOptions(NamedTuple):
    """As the model passes them. ``sinks`` are one logit per query head that takes part in the softmax and attends to nothing
    (GPT-OSS); ``softcap`` bounds the scores by ``softcap * tanh(score / softcap)`` (Gemma 2); ``window`` is the number of
    positions a query sees, its own included (sliding window)."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
