"""Any readable model -> safetensors in the dtype that runs, with its tokenizer."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.models.files import ModelNotAvailableError


def convert(source: Path, target: Path, dtype: str, *, gguf: bool = False) -> None:
    """Load ``source`` (a folder, or with ``gguf`` a .gguf file) and save it to ``target`` in ``dtype``.

    GGUF weights are dequantised: transformers otherwise keeps them packed, and a packed model can be neither saved nor
    memory-mapped. Raises :class:`ModelNotAvailableError` also where the file lacks weights that the model has: transformers
    would make them up.
    """
    import torch

    with _quiet():
        try:
            model, tokenizer, missing = _load(source, getattr(torch, dtype), gguf=gguf)
        except Exception as error:  # what the libraries raise for a damaged file differs by format and place
            raise ModelNotAvailableError(
                f"{source} could not be read as a causal language model: {_first_line(error)}"
            ) from error
        if missing:
            raise ModelNotAvailableError(
                f"{source} lacks {len(missing)} weights of a {type(model).__name__}, such as {missing[0]}"
            )
        try:
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
        except OSError:
            raise
        except Exception as error:  # safetensors has its own for a full disk
            raise ModelNotAvailableError(f"{source} could not be saved as safetensors: {_first_line(error)}") from error


def _load(source: Path, dtype: Any, *, gguf: bool) -> tuple[Any, Any, list[str]]:
    """Model, tokenizer, names of missing weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    place: Path = source
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if gguf:
        place = source.parent
        options["gguf_file"] = source.name
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
    if gguf:
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True  # never a pickle
    loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, output_loading_info=True, **options)
    model, report = loaded
    return model, tokenizer, sorted(report["missing_keys"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of the libraries between our own progress lines."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
