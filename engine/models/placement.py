"""Where a model runs and in which number type, once ``auto`` is resolved."""

from __future__ import annotations

from engine.settings import ModelSettings


def effective_device(settings: ModelSettings) -> str:
    """``cpu`` or ``cuda``. Imports torch only where ``auto`` has to look for a GPU."""
    if settings.device != "auto":
        return settings.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def effective_dtype(settings: ModelSettings) -> str:
    """float32 on a CPU (its greedy tokens equal stock generate's), bfloat16 on CUDA, unless the settings name one."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if effective_device(settings) == "cuda" else "float32"
