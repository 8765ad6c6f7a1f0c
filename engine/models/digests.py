"""SHA-256 of a model's files, computed once for as long as the file system says that they are unchanged.

Hashing costs about a second a gigabyte, and every process of the cluster wants the fingerprint at its start. So a digest is
remembered with the file's size, dates and inode, and computed again when any of these differs. What that cannot see (a disk that
changes bytes by itself) :func:`changed` finds, on demand. A memory that cannot be read or written costs time, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import platformdirs

MEMORY: Final = "digests"
CONFIG: Final = "config.json"


def cache_root() -> Path:
    """``$MOONPOOL_CACHE``, else the platform's cache folder for moonpool."""
    chosen = os.environ.get("MOONPOOL_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path(platformdirs.user_cache_dir("moonpool"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(digests: dict[str, str]) -> str:
    """Hex digest over configuration and weights, given the SHA-256 of each file. What else lies there changes no logit."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        if name == CONFIG or name.endswith(".safetensors"):
            digest.update(f"{name}={digests[name]}\n".encode())
    return digest.hexdigest()


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each named file in ``folder``. Raises OSError where one cannot be read."""
    known = _remembered(folder)
    fresh: dict[str, Any] = {}
    for name in names:
        state = _state(folder / name)
        entry = known.get(name)
        fresh[name] = entry if entry and entry[:-1] == state else [*state, sha256(folder / name)]
    if any(known.get(name) != entry for name, entry in fresh.items()):
        _remember(folder, known | fresh)
    return {name: entry[-1] for name, entry in fresh.items()}


def changed(folder: Path) -> list[str]:
    """Names of the remembered files whose bytes are not what they were, though nothing says that they were written."""
    known = _remembered(folder)
    return [
        name for name, (*state, digest) in known.items() if _state(folder / name) == state and sha256(folder / name) != digest
    ]


def forget(folder: Path) -> None:
    with contextlib.suppress(OSError):
        _memory(folder).unlink()


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _memory(folder: Path) -> Path:
    place = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    return cache_root() / MEMORY / f"{place}.json"


def _remembered(folder: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(_memory(folder).read_text())
        return {name: entry for name, entry in known.items() if len(entry) == 5 and isinstance(entry[-1], str)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(folder: Path, entries: dict[str, list[Any]]) -> None:
    memory = _memory(folder)
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{memory.name}.", dir=memory.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(entries, file)
            os.replace(name, memory)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
