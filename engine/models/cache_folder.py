"""Prepared models in the user's cache folder: built once, by one process, all or nothing.

A prepared folder holds a manifest with the size and SHA-256 of each file. Sizes and the manifest are checked at every start (a
stat per file); the digests are computed when the folder is built, become part of the fingerprint, and are checked again by
:func:`verify` (``python -m engine.models.prepare --verify``): hashing half a gigabyte at each start would cost more than
loading the model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import platformdirs

from engine.models.files import ModelFiles, ModelNotAvailableError

MANIFEST: Final = "moonpool-manifest.json"
FORMAT: Final = 1
LOCK_TIMEOUT_S: Final = 900.0
LOCK_PERIOD_S: Final = 0.2
WEIGHTS: Final = (".safetensors",)
FINGERPRINTED: Final = ("config.json", *WEIGHTS)

Build = Callable[[Path], None]


def cache_root() -> Path:
    """``$MOONPOOL_CACHE``, else the platform's cache folder for moonpool."""
    chosen = os.environ.get("MOONPOOL_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("moonpool"))


def prepared(folder: Path, name: str, dtype: str, source: dict[str, str], build: Build) -> ModelFiles:
    """The prepared model in ``folder``; ``build(empty_folder)`` makes it where it is missing, damaged or from another ``source``.

    Two processes that ask at once build it once: the other waits, at most ``LOCK_TIMEOUT_S``.
    """
    found = _read(folder, name, dtype, source)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        found = _read(folder, name, dtype, source)
        if found is not None:
            return found
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            build(fresh)
            _write_manifest(fresh, dtype, source)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    found = _read(folder, name, dtype, source)
    if found is None:
        raise ModelNotAvailableError(
            f"the prepared model in {folder} is damaged right after it was built: is the disk full or failing?"
        )
    return found


def verify(folder: Path) -> list[str]:
    """Names of the files in ``folder`` whose bytes are not those of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    return [name for name, entry in manifest["files"].items() if sha256(folder / name) != entry["sha256"]]


def fingerprint(digests: dict[str, str]) -> str:
    """Hex digest over configuration and weights, given the SHA-256 of each file."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        if name.endswith(FINGERPRINTED):
            digest.update(f"{name}={digests[name]}\n".encode())
    return digest.hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path, name: str, dtype: str, source: dict[str, str]) -> ModelFiles | None:
    """None where the folder does not hold this model, whole."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        whole = (
            manifest["format"] == FORMAT
            and manifest["dtype"] == dtype
            and manifest["source"] == source
            and all((folder / file).stat().st_size == entry["bytes"] for file, entry in manifest["files"].items())
        )
        return ModelFiles(folder, name, str(manifest["fingerprint"]), dtype) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_manifest(folder: Path, dtype: str, source: dict[str, str]) -> None:
    digests = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = {
        "format": FORMAT,
        "dtype": dtype,
        "source": source,
        "fingerprint": fingerprint(digests),
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that ends with its process, waited for with a deadline."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelNotAvailableError(
                        f"another process has been preparing the model for {LOCK_TIMEOUT_S:g} s ({path})"
                    ) from None
                time.sleep(LOCK_PERIOD_S)
        yield
