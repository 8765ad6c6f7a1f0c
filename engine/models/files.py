"""A model on disk, ready to be memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class ModelNotAvailableError(Exception):
    """The model cannot be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """``path`` holds config.json, safetensors in ``dtype`` and the tokenizer. ``fingerprint`` digests config and weights: the
    same bytes have the same fingerprint on every machine, whatever the folder is called."""

    path: Path
    name: str
    fingerprint: str
    dtype: str
