"""Weights in the CPU's own matrix layout, for decode.

A decode step multiplies a handful of rows with every weight, and a plain row-major weight then costs up to twice the time of one
that oneDNN has reordered into its blocked form beforehand. The price is a private copy of the weights in each process that
packs, beside the mapped file that all processes share: worth it where tokens are decoded, not where prompts are computed.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

ROWS_TYPICAL: Final = 16
"""Rows the layout is chosen for; any number of rows works."""

# What torch's own compiler lowers a linear layer to. Not public: without them the model runs unpacked.
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class PackedLinears:
    """The linear layers of a model, each with a packed twin that is used within ``with packed:`` and not otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self._active = False
        self.bytes = 0
        for module in list(model.modules()):
            if type(module) is nn.Linear and module.weight.is_cpu and packable(module.weight.dtype):
                # An instance's own `forward` takes the place of its class's: the model's code stays as it is.
                module.forward = self._forward(module)
                self.bytes += module.weight.nbytes

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, *_: object) -> None:
        self._active = False

    def _forward(self, module: nn.Linear) -> Any:
        assert _reorder is not None
        assert _linear is not None
        linear, plain, bias = _linear, nn.functional.linear, module.bias
        with torch.inference_mode():
            weight = _reorder(module.weight.detach(), ROWS_TYPICAL)

        def forward(x: Tensor) -> Tensor:
            if self._active:
                return linear(x, weight, bias, "none", [], "")
            return plain(x, module.weight, bias)

        return forward


def packable(dtype: torch.dtype) -> bool:
    """Has this torch the operators, and this CPU the instructions?"""
    if _reorder is None or _linear is None or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
