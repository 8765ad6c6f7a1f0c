"""Views of a cluster for tests of routing, written as tables of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.routing.links import LinkSpeeds
from scheduler.routing.view import DecodeView, Need, OpenWork, PrefillView, Prefixes, View

BLOCK_BYTES = 1_000_000
NODES = ("n0", "n1", "n2")
NEED = Need(tokens=1034, block_tokens=64, block_bytes=BLOCK_BYTES, reusable_blocks=16, decode_blocks=20, expected_output=0.0)
NEVER = 1e9


@dataclass(frozen=True)
class P:
    """A prefill worker. ``work``: (precedence, seconds) of its open requests; ``queue_s`` is their sum unless given."""

    id: str
    node: str = "n0"
    queue_s: float = 0.0
    tokens_per_s: float = 1000.0
    per_position: float = 0.0
    work: tuple[tuple[float, float], ...] = ()
    able: bool = True


@dataclass(frozen=True)
class D:
    id: str
    node: str = "n0"
    room: int = 100
    sequences: int = 0
    total: int = 100
    able: bool = True


def view(
    prefill: Sequence[P],
    decode: Sequence[D],
    prefixes: Mapping[str, int] | None = None,
    *,
    link: float = 1e9,
    dram: Mapping[str, int] | None = None,
    promised: Mapping[str, int] | None = None,
    sending: Mapping[str, float] | None = None,
    ssd_s_per_byte: float = 1e-9,
    dead: Sequence[str] = (),
    now: float = 0.0,
) -> View:
    """``prefixes``: leading blocks by node; ``dram``: those before the first on the SSD; ``promised``: with those under way."""
    blocks = _by_slot(prefixes or {})
    dram_first = np.minimum(blocks, _by_slot(dram)) if dram is not None else blocks
    places = max([len(p.work) or int(p.queue_s > 0) for p in prefill], default=0) or 1
    precedence, seconds = np.full((len(prefill), places), np.inf), np.zeros((len(prefill), places))
    for row, p in enumerate(prefill):
        for place, (first, each) in enumerate(p.work or (((-NEVER, p.queue_s),) if p.queue_s else ())):
            precedence[row, place], seconds[row, place] = first, each
    queue_s = seconds.sum(axis=1)
    sources = np.array([node not in dead for node in NODES] + [False])
    return View(
        PrefillView(
            [p.id for p in prefill],
            _slots(prefill),
            np.array([p.able for p in prefill]),
            queue_s,
            np.array([1 / p.tokens_per_s for p in prefill]),
            np.array([p.per_position for p in prefill]),
            np.full(len(prefill), 1 / 4e9),
            np.full(len(prefill), ssd_s_per_byte),
            OpenWork(precedence, seconds, np.zeros(len(prefill)), np.zeros(len(prefill))),
        ),
        DecodeView(
            [d.id for d in decode],
            _slots(decode),
            np.array([d.able for d in decode]),
            np.array([d.room for d in decode]),
            np.array([d.total for d in decode]),
            np.array([d.sequences for d in decode]),
            np.zeros(len(decode), np.int64),
            np.full(len(decode), 0.03),
            np.zeros(len(decode)),
            np.zeros(len(decode)),
        ),
        Prefixes(blocks, dram_first, np.maximum(blocks, _by_slot(promised or {}))),
        LinkSpeeds(link),
        np.array([(sending or {}).get(node, 0.0) for node in NODES] + [0.0]),
        sources,
        "shortest",
        now,
    )


def _by_slot(values: Mapping[str, int] | None) -> np.ndarray:
    return np.array([(values or {}).get(node, 0) for node in NODES] + [0], np.int64)


def _slots(workers: Sequence[P] | Sequence[D]) -> np.ndarray:
    return np.array([NODES.index(worker.node) for worker in workers], np.int64)
