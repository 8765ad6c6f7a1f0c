"""Models of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.models.files import ModelNotAvailableError

ANSWER_TIMEOUT_S: Final = 10.0
WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""Never pickled weights, never code."""


def fetch(model_id: str) -> Path:
    """A local folder with ``model_id``: what the hub's own cache holds, else downloaded. Raises
    :class:`ModelNotAvailableError`, within
    ``ANSWER_TIMEOUT_S`` where there is no network: the hub's client alone would try again for most of a minute."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=list(WANTED), local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not in the hub's cache
    try:
        model_info(model_id, timeout=ANSWER_TIMEOUT_S)
        return Path(snapshot_download(model_id, allow_patterns=list(WANTED)))
    except Exception as error:  # its errors are of several HTTP libraries, by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotAvailableError(
            f"{model_id} could not be fetched from the Hugging Face hub ({reason}). If this machine has no network, "
            f"download {model_id} elsewhere and name its folder with --model, "
            "or leave --model out to serve the built-in default model"
        ) from error
