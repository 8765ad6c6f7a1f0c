"""A run's files: written beside the folder asked for, and put in its place when all of them are whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MARK: Final = "report.json"
"""What shows that a folder is one of ours, and may be replaced."""


class OutputError(ValueError):
    """The folder cannot be written, or holds something else."""


def check_folder(out: Path) -> None:
    """Raises OutputError where :func:`write_folder` could not write, or would not dare to. Leaves nothing behind."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file())):
        raise OutputError(f"--out: {out} is there and holds no {MARK}; it will not be replaced")
    real = out.resolve()
    if Path.cwd().is_relative_to(real):
        raise OutputError(f"--out: {out} is the current folder, which cannot be replaced; name one in it")
    try:
        there = next(folder for folder in real.parents if folder.exists())
        Path(tempfile.mkdtemp(prefix=f".{real.name}-", dir=there)).rmdir()
    except OSError as error:
        raise OutputError(f"--out: nothing can be written beside {out}: {error.strerror}") from error


def write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """``files`` by name. An earlier report in ``out`` is replaced as a whole, and stays if the new one cannot be written. Raises
    OutputError."""
    check_folder(out)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            fresh.chmod(0o755)
            for name, data in files.items():
                (fresh / name).write_bytes(data)
            _swap(fresh, out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"--out: {out} was not written: {error.strerror}") from error


def _swap(fresh: Path, out: Path) -> None:
    """``fresh`` becomes ``out``. At no time is there a part of either at ``out``."""
    if not out.exists():
        fresh.rename(out)
        return
    before = fresh.with_name(f"{fresh.name}.before")
    out.rename(before)
    try:
        fresh.rename(out)
    except OSError:
        before.rename(out)
        raise
    shutil.rmtree(before)
