"""Models of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.models.checkpoint import inspect
from engine.models.files import ModelNotAvailableError

ANSWER_TIMEOUT_S: Final = 10.0
WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""Never pickled weights, never code."""
UNWANTED: Final = ("*/*", "consolidated*")
"""The same weights a second time, in the layout of their authors."""


def fetch(model_id: str) -> Path:
    """A local folder with ``model_id``: what the hub's own cache holds if that is whole, else downloaded.

    Raises :class:`ModelNotAvailableError`, within ``ANSWER_TIMEOUT_S`` where there is no network: the hub's client alone would
    try again for most of a minute.
    """
    from huggingface_hub import model_info, snapshot_download

    wanted = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    try:
        folder = Path(snapshot_download(model_id, local_files_only=True, **wanted))
        inspect(folder)  # the cache also holds what an interrupted download, or one of the configuration alone, left
        return folder
    except (OSError, ValueError, ModelNotAvailableError):
        pass
    try:
        model_info(model_id, timeout=ANSWER_TIMEOUT_S)
        return Path(snapshot_download(model_id, **wanted))
    except Exception as error:  # its errors are of several HTTP libraries, by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotAvailableError(
            f"there is no folder {model_id} here, and the Hugging Face hub did not give a model of that name ({reason}). If this "
            f"machine has no network, download {model_id} elsewhere and name its folder with --model, "
            "or leave --model out to serve the built-in default model"
        ) from error
