"""Any readable model -> safetensors in the dtype that runs, with its tokenizer."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from engine.models.files import ModelNotAvailableError


def convert(source: Path | str, target: Path, dtype: str, *, gguf: bool = False) -> None:
    """Load ``source`` (a folder, a Hugging Face id, or with ``gguf`` a .gguf file) and save it to ``target`` in ``dtype``.

    GGUF weights are dequantised: transformers otherwise keeps them packed, and a packed model can be neither saved nor
    memory-mapped.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    numbers = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    place: str = str(source)
    options: dict[str, Any] = {}
    if gguf:
        place, options = str(Path(source).parent), {"gguf_file": Path(source).name}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the libraries
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            if gguf:
                options["quantization_config"] = GgufConfig(dequantize=True)
            else:
                options["use_safetensors"] = True  # never a pickle
            model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=numbers, **options)
            model.to(numbers)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotAvailableError(f"{source} could not be read as a causal language model: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
