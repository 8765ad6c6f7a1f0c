"""The peer of the SSD rows: Debian's ``fio``, sequential, direct, several in flight, in one file that is laid out before."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import SkipBenchmark

DEPTH: Final = 4
"""Operations in flight."""
TIMEOUT_S: Final = 300.0
FILE: Final = "fio.bin"
TEXT_CHARS: Final = 200


def executable() -> str:
    """Raises SkipBenchmark where it is not installed."""
    found = shutil.which("fio")
    if found is None:
        raise SkipBenchmark("fio is not installed (on Debian: apt-get install fio)")
    return found


def command(program: str, directory: Path, verb: str, block_bytes: int, total_bytes: int) -> list[str]:
    """``verb`` is "write" or "read". A write is followed by an fdatasync, as each of ours is."""
    return [
        program, "--name=peer", f"--filename={directory / FILE}", f"--rw={verb}", f"--bs={block_bytes}", f"--size={total_bytes}",
        "--direct=1", "--ioengine=libaio", f"--iodepth={DEPTH}", "--overwrite=1", "--end_fsync=1", "--fallocate=posix",
        "--output-format=json",
    ]  # fmt: skip


def gigabytes_per_s(directory: Path, verb: str, block_bytes: int, total_bytes: int) -> float:
    """One run over the whole file; the file is made by the first one. Raises SkipBenchmark where fio or its libaio lacks or the
    file system refuses direct I/O, RuntimeError where fio did not do what it was told."""
    arguments = command(executable(), directory, verb, block_bytes, total_bytes)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=directory)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-TEXT_CHARS:]
        if "Invalid argument" in said or "not loadable" in said:
            raise SkipBenchmark(f"fio cannot do direct I/O with libaio here: {said}")
        raise RuntimeError(f"fio ended with status {done.returncode}: {said}")
    return rate(json.loads(done.stdout[done.stdout.index("{") :]), verb, total_bytes)


def rate(report: dict[str, Any], verb: str, total_bytes: int) -> float:
    """GB/s out of fio's JSON report. Raises RuntimeError where it had errors or moved another number of bytes."""
    job = report["jobs"][0]
    if job["error"] or job[verb]["io_bytes"] != total_bytes:
        raise RuntimeError(f"fio: error {job['error']}, {job[verb]['io_bytes']} of {total_bytes} bytes")
    milliseconds = job[verb]["runtime"]
    if not milliseconds:
        raise RuntimeError("fio: no time passed")
    return total_bytes / milliseconds / 1e6
