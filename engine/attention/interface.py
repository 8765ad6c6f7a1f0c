"""The one function that transformers' models call for attention, registered under :data:`NAME`.

transformers knows no mask function of that name, so models build no mask; the function finds what the layers share in
:func:`running`, a context variable, since models differ in what they pass through (some pass nothing).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface

from engine.attention.options import AttentionOptions
from engine.attention.steps import AttentionStep

NAME: Final = "moonpool"

_step: ContextVar[AttentionStep] = ContextVar("attention_step")


class UnsupportedAttentionError(Exception):
    """The model asks something of the attention function that it can't do; the text says what."""


@contextmanager
def running(step: AttentionStep) -> Iterator[None]:
    """Within it, the models of this thread attend as ``step`` says."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttentionError(
            f"its attention takes a {'mask' if position_bias is None else 'position bias'} of its own"
        )
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    return _step.get().attend(module.layer_idx, query, key, value, options), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attend)
