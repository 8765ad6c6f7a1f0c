"""The peer Mooncake Store: where it is, how it is started, what it is asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from benchmarks.harness import Fixture, SkipBenchmark
from benchmarks.line_process import LineProcess
from benchmarks.pool_pieces import BLOCK_BYTES_MAX

VARIABLE: Final = "MOONPOOL_PEER_MOONCAKE"
PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
PEER: Final = Path(__file__).resolve().parent / "peers" / "mooncake_store.py"
SEGMENT_BYTES: Final = 1 << 30
START_S: Final = 120.0
ANSWER_S: Final = 120.0
BATCH: Final = 16


def peer_python() -> Path:
    """The interpreter of the environment that ``$MOONPOOL_PEER_MOONCAKE`` names. Raises SkipBenchmark with the reason."""
    named = os.environ.get(VARIABLE)
    if not named:
        raise SkipBenchmark(f"{VARIABLE} does not name a virtual environment with {PACKAGE}")
    python = Path(named).expanduser() / "bin" / "python"
    if not python.exists():
        raise SkipBenchmark(f"{VARIABLE}: there is no {python}")
    if not (python.parent / "mooncake_master").exists():
        raise SkipBenchmark(f"{VARIABLE}: {PACKAGE} is not installed there")
    return python


def _open(mode: str, environment: dict[str, str] | None = None) -> LineProcess:
    command = [str(peer_python()), str(PEER), mode, str(SEGMENT_BYTES), str(BLOCK_BYTES_MAX)]
    return LineProcess(f"Mooncake Store ({mode})", command, start_timeout_s=START_S, environment=environment)


shared_memory: Final = Fixture("mooncake shared memory", lambda: _open("shared_memory"))
checking: Final = Fixture("mooncake with checksums", lambda: _open("shared_memory", {"MOONCAKE_STORE_CHECKSUM": "1"}))
tcp: Final = Fixture("mooncake tcp", lambda: _open("tcp"))


def seconds(peer: LineProcess, verb: str, block_bytes: int, blocks: int, batch: int = BATCH) -> float:
    """``verb`` is "put" or "get" (of what was put last)."""
    return peer.ask(ANSWER_S, do=verb, block=block_bytes, blocks=blocks, batch=batch)["seconds"]
