"""Which pair wins and why: a table of decisions, and the plain search over all pairs as the twin of the quick one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.routing.choose import (
    HANDOFF_S,
    LOCAL_BYTES_PER_S,
    PULL_LATENCY_S,
    ROOM_SHARE_MIN,
    SEQUENCE_S,
    Choice,
    DecodeCandidate,
    Need,
    Obstacle,
    PrefillCandidate,
    View,
    choose,
)
from scheduler.routing.links import LinkSpeeds
from scheduler.routing.prefill_speed import PrefillSpeed

BLOCK_BYTES = 1_000_000
SPEED = PrefillSpeed(1000.0)
SLOW = PrefillSpeed(10.0)
NEED = Need(tokens=1034, block_tokens=64, block_bytes=BLOCK_BYTES, reusable_blocks=16, decode_blocks=20)


def p(worker_id: str, node_id: str = "n0", queue_s: float = 0.0, speed: PrefillSpeed = SPEED) -> PrefillCandidate:
    return PrefillCandidate(worker_id, node_id, queue_s, speed)


def d(worker_id: str, node_id: str = "n0", room: int = 100, sequences: int = 0, total: int = 100) -> DecodeCandidate:
    return DecodeCandidate(worker_id, node_id, room, total, sequences)


def view(
    prefill: list[PrefillCandidate], decode: list[DecodeCandidate], prefixes: dict[str, int] | None = None, link: float = 1e9
) -> View:
    return View(prefill, decode, prefixes or {}, LinkSpeeds(link))


TABLE = {
    "all equal: the smallest ids": (view([p("p1"), p("p0")], [d("d1"), d("d0")]), ("p0", "d0", 0, None)),
    "the shorter queue": (view([p("p0", queue_s=0.1), p("p1")], [d("d0")]), ("p1", "d0", 0, None)),
    "a cached prefix is worth a queue shorter than its recompute": (
        view([p("p0", "n0", 0.9), p("p1", "n1")], [d("d0", "n0")], {"n0": 16}, link=1e3),
        ("p0", "d0", 16, None),
    ),
    "but not a longer one": (
        view([p("p0", "n0", 1.5), p("p1", "n1")], [d("d0", "n0"), d("d1", "n1")], {"n0": 16}, link=1e3),
        ("p1", "d1", 0, None),
    ),
    "over a fast link the prefix is pulled to the idle worker": (
        view([p("p0", "n0", 0.9), p("p1", "n1")], [d("d0", "n0"), d("d1", "n1")], {"n0": 16}, link=1e9),
        ("p1", "d1", 16, "n0"),
    ),
    "a pull slower than the recompute is not made": (
        view([p("p0", "n0")], [d("d0")], {"n1": 16}, link=1e6),
        ("p0", "d0", 0, None),
    ),
    "the longer prefix elsewhere beats the shorter here": (
        view([p("p0", "n0")], [d("d0")], {"n0": 4, "n1": 16}),
        ("p0", "d0", 16, "n1"),
    ),
    "unless the rest is not worth the way": (
        view([p("p0", "n0")], [d("d0")], {"n0": 15, "n1": 16}, link=1e7),
        ("p0", "d0", 15, None),
    ),
    "of two holders the smaller id": (view([p("p0")], [d("d0")], {"n2": 9, "n1": 9}), ("p0", "d0", 9, "n1")),
    "the last token is always computed": (view([p("p0")], [d("d0")], {"n0": 40}), ("p0", "d0", 16, None)),
    "the faster worker": (view([p("p0", speed=SLOW), p("p1")], [d("d0")]), ("p1", "d0", 0, None)),
    "decode at the same node": (view([p("p0", "n1")], [d("d0", "n0"), d("d1", "n1")]), ("p0", "d1", 0, None)),
    "an empty batch elsewhere beats a busy one here": (
        view([p("p0", "n0")], [d("d0", "n0", sequences=8), d("d1", "n1")]),
        ("p0", "d1", 0, None),
    ),
    "the smaller batch": (view([p("p0")], [d("d0", sequences=3), d("d1", sequences=2)]), ("p0", "d1", 0, None)),
    "the roomier cache": (view([p("p0")], [d("d0", room=30), d("d1", room=60)]), ("p0", "d1", 0, None)),
    "only where the request fits": (view([p("p0")], [d("d0", room=19), d("d1", room=20, sequences=50)]), ("p0", "d1", 0, None)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_pair_that_wins(name: str) -> None:
    seen, expected = TABLE[name]
    choice = choose(NEED, seen)
    assert isinstance(choice, Choice)
    assert (choice.prefill.worker_id, choice.decode.worker_id, choice.cached_blocks, choice.source) == expected


def test_the_terms_are_the_formula() -> None:
    choice = choose(NEED, view([p("p0", "n0", 0.5)], [d("d0", "n2")], {"n0": 2, "n1": 10}, link=1e8))
    assert isinstance(choice, Choice)
    assert choice.terms.queue_s == 0.5
    assert choice.terms.load_s == pytest.approx(10 * BLOCK_BYTES / LOCAL_BYTES_PER_S + PULL_LATENCY_S + 8 * BLOCK_BYTES / 1e8)
    assert choice.terms.compute_s == pytest.approx((1034 - 640) / 1000)
    # The last 256 tokens (4 blocks) can still be on their way when prefill ends.
    assert choice.terms.handoff_s == pytest.approx(HANDOFF_S + PULL_LATENCY_S + 4 * BLOCK_BYTES / 1e8)
    assert choice.terms.ttft_s == pytest.approx(sum([0.5, choice.terms.load_s, 0.394, choice.terms.handoff_s]))


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (view([], [d("d0")]), "no_prefill"),
        (view([p("p0")], []), "no_decode"),
        (view([p("p0")], [d("d0", room=19), d("d1", room=0)]), "decode_full"),
    ],
)
def test_obstacles(seen: View, reason: str) -> None:
    assert choose(NEED, seen) == Obstacle(reason)


def test_an_answer_of_one_token_needs_no_decode_room() -> None:
    assert isinstance(choose(replace(NEED, decode_blocks=0), view([p("p0")], [d("d0", room=0, total=0)])), Choice)


def plain_search(need: Need, seen: View) -> tuple[float, str, str] | None:
    """The twin: the docstring's formula over every pair and every way to get the prefix."""
    costs: list[tuple[float, str, str]] = []
    for a in seen.prefill:
        local = min(seen.prefixes.get(a.node_id, 0), need.reusable_blocks)
        ways = [(0, None), (local, None)]
        ways += [(min(blocks, need.reusable_blocks), node) for node, blocks in seen.prefixes.items()]
        longest = max(blocks for blocks, _ in ways)
        for blocks, source in ways:
            if source is not None and (blocks <= local or blocks < longest):
                continue
            load = blocks * need.block_bytes / LOCAL_BYTES_PER_S
            if source is not None:
                load += PULL_LATENCY_S + (blocks - local) * need.block_bytes / seen.links.bytes_per_s(source, a.node_id)
            rest = need.tokens - blocks * need.block_tokens
            compute = a.speed.seconds(rest, blocks * need.block_tokens)
            for b in seen.decode:
                if b.room_blocks < need.decode_blocks:
                    continue
                handoff = HANDOFF_S
                if a.node_id != b.node_id:
                    exposed = -(-min(need.tokens, 256) // need.block_tokens) * need.block_bytes
                    handoff += PULL_LATENCY_S + exposed / seen.links.bytes_per_s(a.node_id, b.node_id)
                left = max(ROOM_SHARE_MIN, (b.room_blocks - need.decode_blocks) / max(1, b.total_blocks))
                pressure = SEQUENCE_S * (b.sequences + 1) / left
                costs.append((a.queue_s + load + compute + handoff + pressure, a.worker_id, b.worker_id))
    return min(costs, default=None)


nodes = st.sampled_from(["n0", "n1", "n2"])
prefill_candidates = st.lists(
    st.builds(p, st.uuids().map(str), nodes, st.floats(0, 2), st.sampled_from([SPEED, SLOW])), min_size=1, max_size=5
)
decode_candidates = st.lists(
    st.builds(d, st.uuids().map(str), nodes, st.integers(0, 100), st.integers(0, 20)), min_size=1, max_size=5
)


@settings(max_examples=200, deadline=None)
@given(prefill_candidates, decode_candidates, st.dictionaries(nodes, st.integers(1, 20)), st.sampled_from([1e5, 1e7, 1e9]))
def test_never_dearer_than_the_search_over_all_pairs(
    prefill: list[PrefillCandidate], decode: list[DecodeCandidate], prefixes: dict[str, int], link: float
) -> None:
    seen = view(prefill, decode, prefixes, link)
    expected, choice = plain_search(NEED, seen), choose(NEED, seen)
    if expected is None:
        assert choice == Obstacle("decode_full")
        return
    assert isinstance(choice, Choice)
    left = max(ROOM_SHARE_MIN, (choice.decode.room_blocks - NEED.decode_blocks) / choice.decode.total_blocks)
    cost = choice.terms.ttft_s + SEQUENCE_S * (choice.decode.sequences + 1) / left
    assert cost == pytest.approx(expected[0])


@given(st.permutations([p("p0"), p("p1", "n1"), p("p2", "n1")]), st.permutations([d("d0"), d("d1"), d("d2", "n1")]))
def test_the_order_of_the_candidates_decides_nothing(prefill: list[PrefillCandidate], decode: list[DecodeCandidate]) -> None:
    choice = choose(NEED, view(prefill, decode))
    assert isinstance(choice, Choice)
    assert (choice.prefill.worker_id, choice.decode.worker_id) == ("p0", "d0")
