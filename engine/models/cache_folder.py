"""Prepared models in the user's cache folder: built once, by one process, all or nothing.

A prepared folder holds a manifest with the size and SHA-256 of each file, written when it is built. At every start sizes are
compared, and the digests as far as the file system shows a change (see ``digests``): milliseconds for an untouched folder. A
folder that differs is built again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from engine.models.digests import cache_root, digests_of, fingerprint, forget, sha256
from engine.models.files import ModelFiles, ModelNotAvailableError

__all__ = ["MANIFEST", "cache_root", "find_prepared", "prepared"]

MANIFEST: Final = "moonpool-manifest.json"
FORMAT: Final = 1
LOCK_TIMEOUT_S: Final = 900.0
LOCK_PERIOD_S: Final = 0.2

Build = Callable[[Path, Path], None]
"""Fills the first folder with a model; may use the second as scratch. Both are empty."""
Progress = Callable[[str], None]


def prepared(
    folder: Path, name: str, dtype: str, source: dict[str, str], build: Build, progress: Progress = lambda _: None
) -> ModelFiles:
    """The prepared model in ``folder``; ``build`` makes it where it is missing, damaged or from another ``source``.

    Processes that ask at once build it once: the others wait, at most ``LOCK_TIMEOUT_S``. What a killed build left goes with the
    next one. Raises :class:`ModelNotAvailableError`, also for a cache folder that is full or cannot be written.
    """
    found = find_prepared(folder, name, dtype, source)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock", progress):
            found = find_prepared(folder, name, dtype, source)
            if found is not None:
                return found
            _build(folder, dtype, source, build)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room there" if full else "make it writable"
        raise ModelNotAvailableError(
            f"the model cannot be kept in {folder.parent} ({error.strerror or error}): {advice}, "
            "or name another folder in MOONPOOL_CACHE"
        ) from error
    found = find_prepared(folder, name, dtype, source)
    if found is None:
        raise ModelNotAvailableError(f"the model in {folder} is damaged right after it was built: is the disk full or failing?")
    return found


def find_prepared(folder: Path, name: str, dtype: str, source: dict[str, str]) -> ModelFiles | None:
    """None where the folder does not hold this model, whole. Builds nothing."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if (manifest["format"], manifest["dtype"], manifest["source"]) != (FORMAT, dtype, source):
            return None
        if any((folder / file).stat().st_size != entry["bytes"] for file, entry in files.items()):
            return None
        digests = digests_of(folder, list(files))
        whole = all(digests[file] == entry["sha256"] for file, entry in files.items())
        return ModelFiles(folder, name, fingerprint(digests), dtype) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build(folder: Path, dtype: str, source: dict[str, str], build: Build) -> None:
    """Under the lock: no other process is building in a folder of this prefix."""
    prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        fresh, scratch = work / "model", work / "scratch"
        fresh.mkdir()
        scratch.mkdir()
        build(fresh, scratch)
        _write_manifest(fresh, dtype, source)
        _sync(fresh)
        if folder.exists():
            folder.rename(work / "replaced")  # a process that has mapped it keeps its pages
        fresh.rename(folder)
        forget(folder)  # what is remembered is of other files
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(folder: Path, dtype: str, source: dict[str, str]) -> None:
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
    manifest = {"format": FORMAT, "dtype": dtype, "source": source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _sync(folder: Path) -> None:
    """The bytes must be on disk before the name: after a power cut a file of the right size may hold nothing."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """An exclusive lock that ends with its process, waited for with a deadline."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    told = False
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
            if not told:
                progress("model: another process is preparing it, waiting")
                told = True
            time.sleep(LOCK_PERIOD_S)
        yield
