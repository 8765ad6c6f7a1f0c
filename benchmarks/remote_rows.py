"""Blocks pulled from another node over loopback TCP, checked on arrival: beside plain sockets and beside Mooncake Store's TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

from benchmarks import mooncake_rates as mooncake
from benchmarks.figures import Row, at_least
from benchmarks.harness import registry
from benchmarks.line_process import LineProcess
from benchmarks.pool_pieces import BATCH, MIB, ROUNDS, SIZES_MIB, blocks_of, gigabytes_per_s
from benchmarks.remote_speed import BLOCKS, pool_rate, raw_rate
from benchmarks.rounds import Round, rounds_of

OF_RAW: Final = 0.6
OF_MOONCAKE: Final = 1.5


def beside_sockets(size_mib: int) -> Callable[[], Iterator[Row]]:
    """``sendall`` out of one arena and ``recv_into`` another."""

    def measure() -> Iterator[Row]:
        block = size_mib * MIB
        with ExitStack() as stack:
            ours = stack.enter_context(pool_rate(block, BLOCKS[block]))
            raw = stack.enter_context(raw_rate(block, BLOCKS[block], checked=False))
            figures = rounds_of(ROUNDS, lambda: {"ours": ours(), "raw": raw()})
        yield figures["ours"].row_beside(f"remote_get_{size_mib}", "GB/s", figures["raw"], "sockets", target=at_least(OF_RAW))

    return measure


def beside_mooncake(size_mib: int) -> Callable[[LineProcess], Iterator[Row]]:
    """Its batch_get_into of 16, client and segment in two processes. (The put before it is not measured here.)"""

    def measure(peer: LineProcess) -> Iterator[Row]:
        block, blocks = size_mib * MIB, blocks_of(size_mib)
        with pool_rate(block, BLOCKS[block]) as ours:

            def once() -> Round:
                mooncake.seconds(peer, "put", block, blocks, BATCH)
                theirs = gigabytes_per_s(size_mib, mooncake.seconds(peer, "get", block, blocks, BATCH))
                return {"ours": ours(), "theirs": theirs}

            figures = rounds_of(ROUNDS, once)
        yield figures["ours"].row_beside(
            f"remote_get_{size_mib}_mooncake", "GB/s", figures["theirs"], "Mooncake tcp", target=at_least(OF_MOONCAKE)
        )

    return measure


for _size in SIZES_MIB:
    registry.benchmark(f"remote_get_{_size}_mooncake", needs=[mooncake.tcp])(beside_mooncake(_size))
for _size in SIZES_MIB:
    registry.benchmark(f"remote_get_{_size}")(beside_sockets(_size))
