"""What is in a model folder, from its names and headers alone: no weights are read."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.models.digests import CONFIG
from engine.models.files import ModelNotAvailableError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZERS: Final = (TOKENIZER, "tokenizer.model", "vocab.json")
"""Only the first is used as it is; the others are converted to it where transformers can."""
HEADER_BYTES_MAX: Final = 100 << 20
"""The format's own limit."""
DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
PARTS: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``weights``: names of the safetensors files that make up the model. ``dtype``: of most of their bytes, None for a type
    that nothing here computes in (a quantised model). ``ready``: the tokenizer needs no conversion."""

    weights: tuple[str, ...]
    dtype: str | None
    ready: bool


def inspect(folder: Path) -> Checkpoint:
    """Raises :class:`ModelNotAvailableError` naming each thing that is missing or damaged, and a model type that transformers
    does not have (the code that some models bring along is never run)."""
    names = _weight_files(folder)
    there = {
        CONFIG: (folder / CONFIG).is_file(),
        f"{SINGLE} (pickled .bin weights are not read)": bool(names),
        f"tokenizer ({TOKENIZER})": any((folder / name).is_file() for name in TOKENIZERS),
    }
    missing = [what for what, found in there.items() if not found] + [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelNotAvailableError(f"model folder {folder}: it has no {' and no '.join(missing)}")
    _known_type(_json(folder / CONFIG))
    stored: Counter[str] = Counter()
    for name in names:
        stored.update(_bytes_by_dtype(folder / name))
    most = max(stored, key=lambda dtype: stored[dtype], default="")
    ready = (folder / TOKENIZER).is_file()
    if ready:
        _json(folder / TOKENIZER)
    return Checkpoint(names, DTYPES.get(most), ready)


def stamp(folder: Path) -> str:
    """Changes when a file of the model is written or replaced."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({path for part in PARTS for path in folder.glob(part)}):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _weight_files(folder: Path) -> tuple[str, ...]:
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return (SINGLE,) if (folder / SINGLE).is_file() else ()
    parts = _json(folder / INDEX).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) and Path(part).name == part for part in parts.values()):
        raise ModelNotAvailableError(f"{folder / INDEX} is not an index of safetensors files")
    return tuple(sorted(set(parts.values())))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotAvailableError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotAvailableError(f"{path} holds no JSON object")
    return content


def _known_type(config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, __version__

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelNotAvailableError(
            f"transformers {__version__} has no model of type {kind!r}, and code that a model brings along is never run"
        )


def _bytes_by_dtype(path: Path) -> Counter[str]:
    """From a safetensors header (length, JSON, then data up to the end of the file). Raises where the file is not whole."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_BYTES_MAX:
                raise ValueError("its header is too long")
            header: dict[str, Any] = json.loads(file.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        stored: Counter[str] = Counter()
        for entry in tensors:
            begin, end = entry["data_offsets"]
            stored[entry["dtype"]] += end - begin
        if path.stat().st_size != 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0):
            raise ValueError("its length is not what its header says")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelNotAvailableError(f"{path} is not a whole safetensors file ({error}): fetch it again") from error
    return stored
