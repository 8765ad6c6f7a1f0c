"""The SSD tier's log and disk in a process of their own, asked line by line.

``python -m benchmarks.ssd_child DIRECTORY SEGMENTS SEGMENT_BYTES BLOCK_BYTES BLOCKS_IN_MEMORY`` -> ``{"ready": true,
"seconds": s, "records": n}``: from the start of the tier to the first record read back, if there is one; how many were found.

``{"do": "write", "records": n, "chain": k}`` -> ``{"seconds": s, "root": key}``: new records, until the last one is on the
medium; the first key of the last chain, hexadecimal.
``{"do": "read", "in_flight": k}`` -> ``{"seconds": s}``: all records of the last write, in their order, checksums verified.
``{"do": "churn", "bytes": b, "chain": k}`` -> ``{"payload": p, "counted": c, "kernel": k}``: so many bytes in chains of random
retention and random length up to ``k``: bytes of payload, written as the tier counts them, and as the kernel counts them for us.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.lines import answers_to_own_stdout, serve
from benchmarks.ssd_speed import SsdOwner, chains
from kv_pool.keys import BlockKey

TTL_S: Final = (3600.0, 86400.0, 14 * 86400.0)
"""Three retention classes."""


def bytes_written_by_us() -> int:
    """What the kernel sent to the storage for this process."""
    text = Path("/proc/self/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["write_bytes"])


class Child:
    def __init__(self, owner: SsdOwner, block_bytes: int) -> None:
        self._owner = owner
        self._block = block_bytes
        self._series = time.time_ns()  # other keys than in an earlier process
        self._keys: list[BlockKey] = []

    def handle(self, question: dict[str, Any]) -> dict[str, Any]:
        match question:
            case {"do": "write", "records": records, "chain": chain}:
                seconds = self._write(records, chain)
                return {"seconds": seconds, "root": self._keys[(records - 1) // chain * chain].hex()}
            case {"do": "read", "in_flight": in_flight}:
                started = time.perf_counter()
                self._owner.read_all(self._keys, in_flight)
                return {"seconds": time.perf_counter() - started}
            case {"do": "churn", "bytes": total, "chain": chain}:
                return self._churn(total, chain)
        raise ValueError(f"no such question: {question}")

    def _write(self, records: int, chain: int) -> float:
        self._series += 1
        every = list(chains(self._series, records, chain))
        self._keys = [key for keys in every for key in keys]
        started = time.perf_counter()
        for keys in every:
            self._owner.write_chain(keys)
        self._owner.finish()
        return time.perf_counter() - started

    def _churn(self, total: int, chain: int) -> dict[str, Any]:
        draw = random.Random(20)
        owner = self._owner
        counted, kernel = int(owner.disk.stats()["ssd_bytes_written"]), bytes_written_by_us()
        payload = 0
        while payload < total:
            self._series += 1
            keys = next(chains(self._series, draw.randint(1, chain), chain))
            owner.write_chain(keys, draw.randrange(len(TTL_S)))
            payload += len(keys) * self._block
        owner.finish()
        return {
            "payload": payload,
            "counted": int(owner.disk.stats()["ssd_bytes_written"]) - counted,
            "kernel": bytes_written_by_us() - kernel,
        }


def main() -> None:
    answer = answers_to_own_stdout()
    directory = Path(sys.argv[1])
    segments, segment_bytes, block_bytes, slots = map(int, sys.argv[2:6])
    started = time.perf_counter()
    with SsdOwner(
        directory, segments=segments, segment_bytes=segment_bytes, slot_bytes=block_bytes, slots=slots, ttl_s=TTL_S
    ) as owner:
        owner.read_all(owner.log.keys()[-1:], 1)
        serve(answer, Child(owner, block_bytes).handle, seconds=time.perf_counter() - started, records=owner.recovered)


if __name__ == "__main__":
    main()
