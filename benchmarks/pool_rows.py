"""A worker and its own node: put and get beside plain memcpy and beside Mooncake Store, and what an acquire takes.

``pool_put_4`` and ``pool_get_4`` move blocks of 4 MiB, 16 a call, without their checksums, which a put knows already and a get
does not verify. ``pool_checksum_4`` is what they cost: memcpy that makes them on the way. ``pool_put_checked_4`` and
``pool_get_checked_4`` are with them, as workers do it.

Mooncake Store has no checksum unless told so: ``..._mooncake_single`` (its shared-memory client, one block a call on both sides),
``..._mooncake_batch`` and ``..._mooncake_tcp`` (16 a call on both sides) compare with ours without; in
``pool_put_checked_4_mooncake`` both make one. All copy the same pieces in the same order (``pool_pieces.py``), and take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks import mooncake_rates as mooncake
from benchmarks.figures import Row, Target, at_least, at_most
from benchmarks.harness import Fixture, registry
from benchmarks.line_process import LineProcess
from benchmarks.pool_pieces import BATCH, MIB, ROUNDS, SIZES_MIB, blocks_of, gigabytes_per_s
from benchmarks.rounds import Round, rank, rounds_of

START_S: Final = 30.0
OPEN_S: Final = 120.0
ANSWER_S: Final = 120.0
OF_MEMCPY: Final = 0.85
OF_SINGLE: Final = 1.2
OF_BATCH: Final = 1.0
OF_TCP: Final = 3.0
VERBS: Final = ("put", "get")
CHAIN: Final = 32
ACQUIRES: Final = 1000
ACQUIRE_BLOCK_MIB: Final = 1

worker: Final = Fixture(
    "pool worker",
    lambda: LineProcess("the pool worker", [sys.executable, "-m", "benchmarks.pool_child"], start_timeout_s=START_S),
)


def our_round(child: LineProcess, size_mib: int, batch: int) -> Round:
    """GB/s of put and get (without checksums), put_checked and get_checked, memcpy_put, memcpy_get and memcpy_checksum."""
    seconds = {}
    for verb in VERBS:
        seconds[f"{verb}_checked"] = child.ask(ANSWER_S, do=verb, batch=batch, checked=True)["seconds"]
    memcpy = child.ask(ANSWER_S, do="memcpy")
    for verb in VERBS:
        seconds[verb] = child.ask(ANSWER_S, do=verb, batch=batch, checked=False)["seconds"]
    seconds |= {"memcpy_put": memcpy["in"], "memcpy_get": memcpy["out"], "memcpy_checksum": memcpy["digest"]}
    return {name: gigabytes_per_s(size_mib, value) for name, value in seconds.items()}


def _opened(child: LineProcess, size_mib: int) -> None:
    child.ask(OPEN_S, do="open", block=size_mib * MIB, blocks=blocks_of(size_mib))


def beside_memcpy(size_mib: int) -> Callable[[LineProcess], Iterator[Row]]:
    def measure(child: LineProcess) -> Iterator[Row]:
        _opened(child, size_mib)
        figures = rounds_of(ROUNDS, lambda: our_round(child, size_mib, BATCH))
        for verb in VERBS:
            plain = figures[f"memcpy_{verb}"]
            target = at_least(OF_MEMCPY)
            yield figures[verb].row_beside(f"pool_{verb}_{size_mib}", "GB/s", plain, "memcpy", target=target)
            yield figures[f"{verb}_checked"].row_beside(f"pool_{verb}_checked_{size_mib}", "GB/s", plain, "memcpy")
        plain = figures["memcpy_put"]
        yield figures["memcpy_checksum"].row_beside(f"pool_checksum_{size_mib}", "GB/s", plain, "memcpy")

    return measure


def beside_mooncake(size_mib: int) -> Callable[[LineProcess, LineProcess, LineProcess], Iterator[Row]]:
    """Our figures are measured anew, in turns with Mooncake's."""

    def measure(child: LineProcess, shared: LineProcess, tcp: LineProcess) -> Iterator[Row]:
        _opened(child, size_mib)

        def once() -> Round:
            ours = {batch: our_round(child, size_mib, batch) for batch in (1, BATCH)}
            figures = {f"ours_{verb}_{batch}": ours[batch][verb] for batch in ours for verb in VERBS}
            for name, peer, batch in (("single", shared, 1), ("batch", shared, BATCH), ("tcp", tcp, BATCH)):
                figures |= {f"{name}_{verb}": _mooncake(peer, verb, size_mib, batch) for verb in VERBS}
            return figures

        figures = rounds_of(ROUNDS, once)
        for name, batch, limit in (("single", 1, OF_SINGLE), ("batch", BATCH, OF_BATCH), ("tcp", BATCH, OF_TCP)):
            for verb in VERBS:
                yield figures[f"ours_{verb}_{batch}"].row_beside(
                    f"pool_{verb}_{size_mib}_mooncake_{name}", "GB/s", figures[f"{name}_{verb}"], f"Mooncake {name}",
                    target=at_least(limit),
                )  # fmt: skip

    return measure


def beside_checking_mooncake(size_mib: int) -> Callable[[LineProcess, LineProcess], Iterator[Row]]:
    def measure(child: LineProcess, peer: LineProcess) -> Iterator[Row]:
        _opened(child, size_mib)

        def once() -> Round:
            ours = our_round(child, size_mib, BATCH)
            theirs = {f"theirs_{verb}": _mooncake(peer, verb, size_mib, BATCH) for verb in VERBS}
            return {f"{verb}_checked": ours[f"{verb}_checked"] for verb in VERBS} | theirs

        figures = rounds_of(ROUNDS, once)
        for verb in VERBS:
            beside = "Mooncake batch, checksums on"
            yield figures[f"{verb}_checked"].row_beside(
                f"pool_{verb}_checked_{size_mib}_mooncake", "GB/s", figures[f"theirs_{verb}"], beside
            )

    return measure


def _mooncake(peer: LineProcess, verb: str, size_mib: int, batch: int) -> float:
    return gigabytes_per_s(size_mib, mooncake.seconds(peer, verb, size_mib * MIB, blocks_of(size_mib), batch))


ACQUIRE_TARGETS: Final[dict[tuple[int, str], Target | None]] = {
    (1, "p50"): None,
    (CHAIN, "p50"): at_most(150.0),
    (CHAIN, "p99"): at_most(1000.0),
}


@registry.benchmark(*(f"pool_acquire_{chain}_{name}" for chain, name in ACQUIRE_TARGETS), needs=[worker])
def acquire(child: LineProcess) -> Iterator[Row]:
    """From the order to the leases, one block and a chain that are in DRAM, without the copy."""
    _opened(child, ACQUIRE_BLOCK_MIB)

    def once() -> Round:
        figures: Round = {}
        for chain in (1, CHAIN):
            taken = child.ask(ANSWER_S, do="acquire", chain=chain, times=ACQUIRES)["microseconds"]
            figures |= {f"{chain}_p50": rank(taken, 0.5), f"{chain}_p99": rank(taken, 0.99)}
        return figures

    figures = rounds_of(ROUNDS, once)
    for (chain, name), target in ACQUIRE_TARGETS.items():
        yield figures[f"{chain}_{name}"].row(f"pool_acquire_{chain}_{name}", "µs", target=target)


for _size in SIZES_MIB:
    _names = [f"pool_{verb}{checked}_{_size}" for verb in VERBS for checked in ("", "_checked")]
    registry.benchmark(*_names, f"pool_checksum_{_size}", needs=[worker])(beside_memcpy(_size))
for _size in SIZES_MIB:
    _names = [f"pool_{verb}_checked_{_size}_mooncake" for verb in VERBS]
    registry.benchmark(*_names, needs=[worker, mooncake.checking])(beside_checking_mooncake(_size))
for _size in SIZES_MIB:
    _names = [f"pool_{verb}_{_size}_mooncake_{name}" for name in ("single", "batch", "tcp") for verb in VERBS]
    registry.benchmark(*_names, needs=[worker, mooncake.shared_memory, mooncake.tcp])(beside_mooncake(_size))
