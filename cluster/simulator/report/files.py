"""A run's files: written beside the folder asked for, and put in its place when all of them are whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.simulator.records import RequestRecord

MARK = "report.json"
"""What shows that a folder is one of ours, and may be replaced."""


class OutputError(ValueError):
    """The folder cannot be written, or holds something else."""


def check_folder(out: Path) -> None:
    """Raises OutputError where :func:`write_folder` would not dare to write."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file())):
        raise OutputError(f"--out: {out} is there and holds no {MARK}; it will not be replaced")


def write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """``files`` by name. An earlier report in ``out`` is replaced as a whole."""
    check_folder(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            fresh.chmod(0o755)
            for name, data in files.items():
                (fresh / name).write_bytes(data)
            if out.exists():
                shutil.rmtree(out)
            fresh.rename(out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"--out: {error}") from error


def request_rows(records: Iterable[RequestRecord]) -> bytes:
    """One JSON object a line, in the order of arrival."""
    return "".join(json.dumps(_row(record)) + "\n" for record in records).encode()


def _row(record: RequestRecord) -> dict[str, Any]:
    row = asdict(record)
    row["outcome"] = str(record.outcome)
    return {name: _rounded(value) for name, value in row.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value
