"""What a routing decision sees and what it answers. Pure data, in columns: a decision looks at every worker, so each figure is
one numpy array over all of them, and a thousand workers cost tens of microseconds.

Rows of ``PrefillView`` and ``DecodeView`` are workers, ``nodes`` their pool node's slot in the block index (-1: not known there).
Arrays by slot have one element more than there are slots, the neutral one, so that slot -1 finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefill_worker.task import Order
from scheduler.plan import PlanTerms
from scheduler.routing.links import LinkSpeeds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes. ``reusable_blocks`` is how many leading blocks a cache may supply (at least one token is always
    computed); ``decode_blocks`` covers the prompt and the expected answer, 0 where prefill's own token is the whole answer."""

    tokens: int
    block_tokens: int
    block_bytes: int
    reusable_blocks: int
    decode_blocks: int
    expected_output: float = 1.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class OpenWork:
    """The requests open at each prefill worker, [workers, places]: their precedence (smaller goes first; an empty place has
    infinity) and their predicted seconds. ``done_s``: seconds of each row's work that are done already, in front.
    ``piece_s``: of one piece there, which is not interrupted."""

    precedence: Floats
    seconds: Floats
    done_s: Floats
    piece_s: Floats


@dataclass(frozen=True, slots=True)
class PrefillView:
    """``able``: may get work. ``queue_s``: seconds of all work given and not done. ``per_token`` and ``per_token_position`` are a
    and b of :mod:`~scheduler.routing.prefill_speed`; ``dram_s_per_byte`` and ``ssd_s_per_byte`` what a load from the own node
    costs."""

    ids: Sequence[str]
    nodes: Ints
    able: Bools
    queue_s: Floats
    per_token: Floats
    per_token_position: Floats
    dram_s_per_byte: Floats
    ssd_s_per_byte: Floats
    work: OpenWork


@dataclass(frozen=True, slots=True)
class DecodeView:
    """``room_blocks`` of ``total_blocks`` are not spoken for; ``sequences`` with ``context_tokens`` are decoded or on their way.
    A step takes ``step_s + step_s_per_sequence · sequences + step_s_per_token · context tokens``."""

    ids: Sequence[str]
    nodes: Ints
    able: Bools
    room_blocks: Ints
    total_blocks: Ints
    sequences: Ints
    context_tokens: Ints
    step_s: Floats
    step_s_per_sequence: Floats
    step_s_per_token: Floats


@dataclass(frozen=True, slots=True)
class Prefixes:
    """By slot: how many leading blocks a node has without a hole (``blocks``), and how many it has in DRAM before the first that
    it has on its SSD only (``dram_first``; what is behind counts as the SSD's, since chains are demoted from their leaves).
    ``promised``: as ``blocks``, those counted that a worker there has been told to compute."""

    blocks: Ints
    dram_first: Ints
    promised: Ints


@dataclass(frozen=True, slots=True)
class View:
    """The cluster at this moment. ``sending_s``: by slot, seconds that a node is still busy sending what it was asked for.
    ``sources``: by slot, whether blocks can be pulled from it."""

    prefill: PrefillView
    decode: DecodeView
    prefixes: Prefixes
    links: LinkSpeeds
    sending_s: Floats
    sources: Bools
    order: Order = "shortest"
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of the chosen workers. ``source`` is the slot that blocks are pulled from, None where the prefill worker's node has
    all of ``cached_blocks``. ``load_max_blocks``: load no more than these, None: all there are."""

    prefill: int
    decode: int
    cached_blocks: int
    source: int | None
    terms: PlanTerms
    load_max_blocks: int | None = None
    pull_s: float = 0.0
    """Seconds of the source's link."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """No pair: ``no_prefill``, ``no_decode`` (nobody to ask) or ``decode_full`` (nobody with the room)."""

    reason: str
