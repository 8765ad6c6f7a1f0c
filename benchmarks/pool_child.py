"""A worker beside its pool node, asked line by line (see ``peers/lines.py``). ``python -m benchmarks.pool_child``

It answers the questions of ``peers/mooncake_store.py`` about the same pieces: ``RING`` blocks of this process, copied one after
the other into blocks of the node and back. ``{"do": "open", "block": b, "blocks": n}`` comes first: a node process with room for
two series of ``n`` blocks, all of its memory written once.

``{"do": "put" or "get", "batch": k, "checked": bool}`` -> ``{"seconds": s}``: ``n`` blocks, ``k`` a call. A put ends when the
node has taken the last commit. ``checked``: checksums are made and verified within; if not, a put knows them already. What is in
the buffers after a get is compared with what was put after the clock has stopped.
``{"do": "memcpy"}`` -> ``{"in": s, "out": s, "digest": s}``: the same pieces by plain memcpy into shared memory of the same size
and back, and once more into it with their checksums made on the way, as a put does it.
``{"do": "acquire", "chain": n, "times": k}`` -> ``{"microseconds": [...]}``: acquires of ``n`` blocks that are there, no copy.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, Final

import xxhash

from benchmarks.peers.lines import answers_to_own_stdout, serve
from benchmarks.pool_speed import Worker, keys_of, node_process
from kv_pool.arena import Arena
from kv_pool.client import copy_and_digest

RING: Final = 16
SPARE: Final = 8
"""Slots beyond the two series."""
PATTERN_BYTES: Final = 1 << 16
PREFAULT_S: Final = 60.0


class Child:
    def __init__(self) -> None:
        self._stack = ExitStack()
        self._series = 0
        self._block = self._blocks = 0

    def handle(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._blocks:
            self._worker.keepalive()
        match question:
            case {"do": "open", "block": block, "blocks": blocks}:
                self._open(block, blocks)
                return {}
            case {"do": "put", "batch": batch, "checked": checked}:
                return {"seconds": self._put(batch, checked)}
            case {"do": "get", "batch": batch, "checked": checked}:
                return {"seconds": self._get(batch, checked)}
            case {"do": "memcpy"}:
                return self._memcpy()
            case {"do": "acquire", "chain": chain, "times": times}:
                return {"microseconds": self._acquire(chain, times)}
        raise ValueError(f"no such question: {question}")

    def close(self) -> None:
        self._stack.close()

    def _open(self, block: int, blocks: int) -> None:
        self._stack.close()
        slots = 2 * blocks + SPARE
        node = self._stack.enter_context(node_process("bench", block, slots))
        self._worker = Worker(node, block)
        self._stack.callback(self._worker.close)
        self._worker.wait_until_prefaulted(PREFAULT_S)
        self._plain = Arena.create(slots, block)
        self._stack.callback(self._plain.close)
        self._block, self._blocks = block, blocks
        self._ring = memoryview(bytearray(RING * block))
        self._pieces = [self._ring[i * block : (i + 1) * block] for i in range(RING)]
        for slot in range(slots):
            self._plain.slot(slot)[:] = self._pieces[0]
        for _ in range(3):  # the whole arena
            self._put(RING, checked=True)

    def _put(self, batch: int, checked: bool) -> float:
        self._series += 1
        self._fill()
        calls = self._calls(batch)
        digests = [None if checked else [xxhash.xxh3_64_intdigest(piece) for piece in pieces] for _, pieces in calls]
        started = time.perf_counter()
        for (keys, pieces), known in zip(calls, digests, strict=True):
            self._worker.put(keys, pieces, known)
        self._worker.get(calls[-1][0][-1:], None)  # it has taken all commits
        return time.perf_counter() - started

    def _get(self, batch: int, checked: bool) -> float:
        self._ring[:] = bytes(len(self._ring))
        calls = self._calls(batch)
        started = time.perf_counter()
        for keys, pieces in calls:
            self._worker.get(keys, pieces, checked=checked)
        seconds = time.perf_counter() - started
        self._compare()
        return seconds

    def _calls(self, batch: int) -> list[tuple[list[Any], list[memoryview]]]:
        keys = keys_of(self._series, self._blocks)
        firsts = range(0, self._blocks, batch)
        return [(keys[i : i + batch], self._pieces[i % RING : i % RING + len(keys[i : i + batch])]) for i in firsts]

    def _memcpy(self) -> dict[str, float]:
        slots = [self._plain.slot((self._series * self._blocks + i) % self._plain.slots) for i in range(self._blocks)]
        pairs = [(slot, self._pieces[i % RING]) for i, slot in enumerate(slots)]
        started = time.perf_counter()
        for slot, piece in pairs:
            slot[:] = piece
        between = time.perf_counter()
        for slot, piece in pairs:
            piece[:] = slot
        ended = time.perf_counter()
        for slot, piece in pairs:
            copy_and_digest(piece, slot)
        return {"in": between - started, "out": ended - between, "digest": time.perf_counter() - ended}

    def _acquire(self, chain: int, times: int) -> list[float]:
        keys = keys_of(self._series, self._blocks)[:chain]
        return [1e6 * self._worker.acquire_seconds(keys) for _ in range(times)]

    def _pattern(self, place: int) -> bytes:
        return (b"%08d%08d" % (self._series, place)) * (PATTERN_BYTES // 16)

    def _fill(self) -> None:
        for place, piece in enumerate(self._pieces):
            pattern = (self._pattern(place) * (-(-self._block // PATTERN_BYTES)))[: self._block]
            piece[:] = pattern

    def _compare(self) -> None:
        for place, piece in enumerate(self._pieces[: self._blocks]):
            pattern = self._pattern(place)
            for at in range(0, self._block, PATTERN_BYTES):
                end = min(self._block, at + PATTERN_BYTES)
                if piece[at:end] != pattern[: end - at]:
                    raise RuntimeError("the pool returned other bytes than were put")


def main() -> None:
    answer = answers_to_own_stdout()
    child = Child()
    try:
        serve(answer, child.handle)
    finally:
        child.close()


if __name__ == "__main__":
    main()
