"""Which pair each policy takes and why: tables of decisions, and for ours the plain search over all pairs as the twin of the
quick one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_view import BLOCK_BYTES, NEED, NODES, D, P, view

from prefill_worker.task import PATIENCE, precedence
from scheduler.plan import SchedulerSettings
from scheduler.routing import price
from scheduler.routing.policy import Policy
from scheduler.routing.registry import make_policy
from scheduler.routing.view import Choice, Need, Obstacle, View

POLICIES = get_args(SchedulerSettings.model_fields["policy"].annotation)
SLOW = 10.0


def policy(name: str, **settings: object) -> Policy:
    return make_policy(SchedulerSettings(policy=name, **settings))  # type: ignore[arg-type]


def taken(seen: View, choice: Choice | Obstacle) -> tuple[str, str, int, str | None]:
    assert isinstance(choice, Choice)
    source = None if choice.source is None else NODES[choice.source]
    return seen.prefill.ids[choice.prefill], seen.decode.ids[choice.decode], choice.cached_blocks, source


OURS = {
    "all equal: those that joined first": (view([P("p1"), P("p0")], [D("d1"), D("d0")]), ("p1", "d1", 0, None)),
    "the shorter queue": (view([P("p0", queue_s=0.1), P("p1")], [D("d0")]), ("p1", "d0", 0, None)),
    "a cached prefix is worth a queue shorter than its recompute": (
        view([P("p0", "n0", 0.9), P("p1", "n1")], [D("d0", "n0")], {"n0": 16}, link=1e3),
        ("p0", "d0", 16, None),
    ),
    "and a little more, for what the recompute would cost the others, but not much more": (
        view([P("p0", "n0", 5.0), P("p1", "n1")], [D("d0", "n0"), D("d1", "n1")], {"n0": 16}, link=1e3),
        ("p1", "d1", 0, None),
    ),
    "over a fast link the prefix is pulled to the idle worker": (
        view([P("p0", "n0", 0.9), P("p1", "n1")], [D("d0", "n0"), D("d1", "n1")], {"n0": 16}),
        ("p1", "d1", 16, "n0"),
    ),
    "a pull slower than the recompute is not made": (
        view([P("p0", "n0")], [D("d0")], {"n1": 16}, link=1e6),
        ("p0", "d0", 0, None),
    ),
    "the longer prefix elsewhere beats the shorter here": (
        view([P("p0", "n0")], [D("d0")], {"n0": 4, "n1": 16}),
        ("p0", "d0", 16, "n1"),
    ),
    "unless the rest is not worth the way": (
        view([P("p0", "n0")], [D("d0")], {"n0": 15, "n1": 16}, link=1e7),
        ("p0", "d0", 15, None),
    ),
    "of two holders the one that is not busy sending": (
        view([P("p0")], [D("d0")], {"n2": 9, "n1": 9}, sending={"n1": 3.0}),
        ("p0", "d0", 9, "n2"),
    ),
    "from a holder that is gone nothing is pulled": (view([P("p0")], [D("d0")], {"n1": 9}, dead=["n1"]), ("p0", "d0", 0, None)),
    "the last token is always computed": (view([P("p0")], [D("d0")], {"n0": 40}), ("p0", "d0", 16, None)),
    "the faster worker": (view([P("p0", tokens_per_s=SLOW), P("p1")], [D("d0")]), ("p1", "d0", 0, None)),
    "decode at the same node": (view([P("p0", "n1")], [D("d0", "n0"), D("d1", "n1")]), ("p0", "d1", 0, None)),
    "an empty batch elsewhere beats a busy one here": (
        view([P("p0", "n0")], [D("d0", "n0", sequences=8), D("d1", "n1")]),
        ("p0", "d1", 0, None),
    ),
    "the smaller batch": (view([P("p0")], [D("d0", sequences=3), D("d1", sequences=2)]), ("p0", "d1", 0, None)),
    "the roomier cache": (view([P("p0")], [D("d0", room=30), D("d1", room=60)]), ("p0", "d1", 0, None)),
    "only where the request fits": (view([P("p0")], [D("d0", room=19), D("d1", sequences=50)]), ("p0", "d1", 0, None)),
    "only workers that may get work": (
        view([P("p0", able=False), P("p1")], [D("d0", able=False), D("d1")]),
        ("p1", "d1", 0, None),
    ),
    "a disk slower than the recompute is left alone": (
        view([P("p0")], [D("d0")], {"n0": 16}, dram={"n0": 6}, ssd_s_per_byte=1e-6),
        ("p0", "d0", 6, None),
    ),
    "blocks that a worker is about to compute count as its own, behind its queue": (
        view([P("p0", "n0", 0.2), P("p1", "n1")], [D("d0", "n0"), D("d1", "n1")], promised={"n0": 16}),
        ("p0", "d0", 16, None),
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_ours(name: str) -> None:
    seen, expected = OURS[name]
    assert taken(seen, policy("ours").choose(NEED, seen)) == expected


THREE = [P("p0", "n0", 0.3), P("p1", "n1", 0.2), P("p2", "n2", 0.1)]
TWO = [D("d0", "n0", sequences=1), D("d1", "n1")]
OTHERS = {
    "least_loaded": {
        "the least work, whatever is cached": (view(THREE, TWO, {"n0": 16}), ("p2", "d1", 0, None)),
        "what its own node has is used": (view(THREE, TWO, {"n2": 16, "n0": 9}), ("p2", "d1", 16, None)),
    },
    "local_cache_aware": {
        "queue plus what its own node leaves to compute": (view(THREE, TWO, {"n0": 16, "n1": 4}), ("p0", "d0", 16, None)),
        "nothing is pulled": (view([P("p0", "n0")], [D("d0")], {"n1": 16}), ("p0", "d0", 0, None)),
    },
    "mooncake": {
        "own match within the threshold of the best: no pull": (
            view([P("p0", "n0")], [D("d0")], {"n0": 8, "n1": 16}),
            ("p0", "d0", 8, None),
        ),
        "beyond it: pull": (view([P("p0", "n0")], [D("d0")], {"n0": 7, "n1": 16}), ("p0", "d0", 16, "n1")),
        "no own match is an infinite ratio, however slow the link": (
            view([P("p0", "n0")], [D("d0")], {"n1": 16}, link=1e6),
            ("p0", "d0", 16, "n1"),
        ),
        "the sum of transfer, whole queue and compute decides": (
            view([P("p0", "n0", 0.9), P("p1", "n1")], [D("d0", "n0")], {"n0": 16}),
            ("p1", "d0", 16, "n0"),
        ),
    },
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in OTHERS.items() for case in cases])
def test_the_others(name: str, case: str) -> None:
    seen, expected = OTHERS[name][case]
    assert taken(seen, policy(name).choose(NEED, seen)) == expected


def test_round_robin_goes_round_and_skips_who_may_not() -> None:
    turns = policy("round_robin")
    seen = view([P("p0"), P("p1", able=False), P("p2")], [D("d0"), D("d1", room=3), D("d2")])
    assert [taken(seen, turns.choose(NEED, seen))[:2] for _ in range(4)] == [("p0", "d0"), ("p2", "d2")] * 2


def test_random_uses_all_and_repeats_itself_with_its_seed() -> None:
    seen = view([P("p0"), P("p1"), P("p2", able=False)], [D("d0"), D("d1")])
    draws = [[taken(seen, draw.choose(NEED, seen))[:2] for _ in range(40)] for draw in (policy("random"), policy("random"))]
    assert draws[0] == draws[1]
    assert set(Counter(draws[0])) == {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}
    other = policy("random", seed=1)
    assert [taken(seen, other.choose(NEED, seen))[:2] for _ in range(40)] != draws[0]


def test_an_unknown_policy_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"random.*round_robin.*least_loaded.*local_cache_aware.*mooncake.*ours"):
        SchedulerSettings(policy="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (view([], [D("d0")]), "no_prefill"),
        (view([P("p0", able=False)], [D("d0")]), "no_prefill"),
        (view([P("p0")], []), "no_decode"),
        (view([P("p0")], [D("d0", room=19), D("d1", room=0)]), "decode_full"),
    ],
)
def test_obstacles(name: str, seen: View, reason: str) -> None:
    assert policy(name).choose(NEED, seen) == Obstacle(reason)


@pytest.mark.parametrize("name", POLICIES)
def test_colocated_decodes_where_it_prefills(name: str) -> None:
    chooser = policy(name, colocated=True)
    seen = view([P("p0", "n0", 9.0), P("p1", "n1")], [D("d0", "n0"), D("d1", "n1", room=0), D("d2", "n2")], {"n1": 16})
    assert taken(seen, chooser.choose(NEED, seen))[:2] == ("p0", "d0")
    nowhere = view([P("p0", "n0")], [D("d1", "n1")])
    assert chooser.choose(NEED, nowhere) == Obstacle("decode_full")


@pytest.mark.parametrize("name", POLICIES)
def test_an_answer_of_one_token_needs_no_decode_room(name: str) -> None:
    seen = view([P("p0")], [D("d0", room=0, total=0)])
    assert isinstance(policy(name).choose(replace(NEED, decode_blocks=0), seen), Choice)


def test_the_terms_are_the_formula() -> None:
    seen = view([P("p0", "n0", 0.5)], [D("d0", "n2")], {"n0": 2, "n1": 10}, link=1e8)
    choice = policy("ours").choose(NEED, seen)
    assert isinstance(choice, Choice)
    terms = choice.terms
    assert terms.queue_s == 0.5
    assert terms.load_s == pytest.approx(10 * BLOCK_BYTES / 4e9 + price.PULL_LATENCY_S + 8 * BLOCK_BYTES / 1e8)
    assert terms.overlap_s == terms.load_s
    assert terms.compute_s == pytest.approx((1034 - 640) / 1000)
    # The last 256 tokens (4 blocks) can still be on their way when prefill ends.
    assert terms.handoff_s == pytest.approx(price.HANDOFF_S + price.PULL_LATENCY_S + 4 * BLOCK_BYTES / 1e8)
    assert terms.ttft_s == pytest.approx(0.5 + 0.394)


def test_a_load_that_the_wait_hides_is_free() -> None:
    """0.5 s of queue; reading from the disk is dearer than computing, but not while the request waits anyway."""
    seen = view([P("p0", "n0", 0.5)], [D("d0")], {"n0": 16}, dram={"n0": 2}, ssd_s_per_byte=2e-7)
    choice = policy("ours").choose(NEED, seen)
    assert isinstance(choice, Choice)
    assert choice.terms.load_s <= choice.terms.queue_s
    assert choice.load_max_blocks == choice.cached_blocks
    per_block_s = BLOCK_BYTES * 2e-7
    assert choice.cached_blocks == 2 + math.floor((0.5 - 2 * BLOCK_BYTES / 4e9) / per_block_s)


def test_a_short_request_goes_before_long_ones_and_counts_only_those_before_it() -> None:
    """Two workers with the same queue: one long request at p0, many short ones at p1. A short one waits less at p0."""
    long_work, short_work = ((PATIENCE * 30.0, 30.0),), tuple((0.001 * i, 3.0) for i in range(10))
    seen = view([P("p0", work=long_work), P("p1", work=short_work)], [D("d0")])
    choice = policy("ours").choose(replace(NEED, tokens=100, reusable_blocks=1), seen)
    assert isinstance(choice, Choice)
    assert seen.prefill.ids[choice.prefill] == "p0"
    assert choice.terms.queue_s == 0.0


@pytest.mark.parametrize("order", ["shortest", "fcfs"])
def test_waits_is_what_sorting_the_queue_says(order: str) -> None:
    work = ((5.0, 1.0), (1.0, 2.0), (9.0, 4.0), (3.0, 8.0))
    seen = replace(view([P("p0", work=work), P("p1")], [D("d0")], now=2.5), order=order)
    compute_s = np.array([1.0, 1.0])
    mine = precedence(order, 2.5, 1.0, 0)  # type: ignore[arg-type]
    wait_s, behind = price.waits(NEED, seen, compute_s)
    assert wait_s.tolist() == [sum(s for first, s in work if first <= mine), 0.0]
    assert behind.tolist() == [sum(first > mine for first, _ in work), 0]


def test_sixteen_siblings_with_a_new_prefix_go_to_one_or_two_workers() -> None:
    """A burst of one long new prefix: the promise of it holds the siblings together."""
    from scheduler_scene import keys_of, small_cluster

    scene = small_cluster(SchedulerSettings(prefill_tokens_per_s=4000.0), prefill=8, decode=8, nodes=8)
    plans = [scene.plan(f"r{i}", keys_of("new", 64), tail=20) for i in range(16)]
    assert len({plan.prefill_worker for plan in plans}) <= 2
    assert sum(plan.cached_blocks == 0 for plan in plans) <= 2


def test_one_hot_worker_does_not_cost_the_others_their_affinity() -> None:
    """Everybody asks for the document at n0; who asks for another still goes where that is."""
    from scheduler_scene import keys_of, small_cluster

    scene = small_cluster(SchedulerSettings(link_bytes_per_s=1e5), prefill=4, decode=4, nodes=4)
    scene.store("n0", keys_of("hot", 32))
    scene.store("n2", keys_of("other", 32))
    for i in range(20):
        scene.plan(f"h{i}", keys_of("hot", 32), tail=400)
    quiet = scene.plan("q", keys_of("other", 32))
    assert (quiet.prefill_worker, quiet.cached_blocks) == ("p2", 32)
    spread = Counter(scene.state.assignments.find((f"h{i}", 0)).prefill.id for i in range(20))  # type: ignore[union-attr]
    assert len(spread) > 1


# --- the twin ------------------------------------------------------------------------------------------------------------


def plain_cost(need: Need, seen: View) -> float:
    """The docstring's formula over every pair and every way to get the prefix, one by one."""
    prefill, decode, blocks, first = seen.prefill, seen.decode, seen.prefixes.blocks, seen.prefixes.dram_first
    source = price.soonest_source(need, seen)
    shortest: list[float] = []
    ways: list[list[tuple[float, float, bool]]] = []
    for row in range(len(prefill.ids)):
        slot = prefill.nodes[row]
        own = min(int(blocks[slot]), need.reusable_blocks)
        dram = min(int(first[slot]), own)
        copy, ssd = need.block_bytes * prefill.dram_s_per_byte[row], need.block_bytes * prefill.ssd_s_per_byte[row]
        own_s = dram * copy + (own - dram) * ssd
        mine = [(0, 0.0, False), (dram, dram * copy, False), (own, own_s, False)]
        promised = max(own, min(int(seen.prefixes.promised[slot]), need.reusable_blocks))
        mine.append((promised, own_s + (promised - own) * copy, promised > own))
        if source >= 0 and min(int(blocks[source]), need.reusable_blocks) > own:
            there = min(int(blocks[source]), need.reusable_blocks)
            pulled = (there - own) * need.block_bytes / seen.links.first_guess
            from_ssd = min(there - own, max(0, there - int(first[source]))) * ssd
            wait = seen.sending_s[source]
            mine.append((there, own_s + (there - own) * copy + price.PULL_LATENCY_S + wait + pulled + from_ssd, False))
        priced: list[tuple[float, float, bool]] = []
        for taken_blocks, load_s, is_promise in mine:
            past = taken_blocks * need.block_tokens
            rest = need.tokens - past
            compute = rest * (prefill.per_token[row] + prefill.per_token_position[row] * (rest + 2 * past))
            priced.append((load_s, compute, is_promise))
        ways.append(priced)
        shortest.append(min(load_s + compute for load_s, compute, _ in priced))
    busy = float(np.mean([prefill.queue_s[row] for row in range(len(prefill.ids)) if prefill.able[row]]))
    typical = float(np.mean([shortest[row] for row in range(len(prefill.ids)) if prefill.able[row]]))
    crowd = busy / (busy + typical + 1e-9)
    best = math.inf
    for row, priced in enumerate(ways):
        if not prefill.able[row]:
            continue
        mine = precedence(seen.order, seen.now, shortest[row], need.priority)
        before = [s for first, s in zip(prefill.work.precedence[row], prefill.work.seconds[row], strict=True) if first <= mine]
        behind = sum(np.isfinite(prefill.work.precedence[row])) - len(before)
        for load_s, compute, is_promise in priced:
            wait = prefill.queue_s[row] if is_promise else min(sum(before), prefill.queue_s[row])
            cost = max(wait, load_s) + compute + compute * (behind + crowd)
            for at in range(len(decode.ids)):
                if not decode.able[at] or decode.room_blocks[at] < need.decode_blocks:
                    continue
                handoff = price.HANDOFF_S
                if prefill.nodes[row] != decode.nodes[at]:
                    exposed = -(-min(need.tokens, 256) // need.block_tokens) * need.block_bytes
                    handoff += price.PULL_LATENCY_S + exposed / seen.links.first_guess
                left = (decode.room_blocks[at] - need.decode_blocks) / max(1, decode.total_blocks[at])
                pressure = price.SEQUENCE_S * (decode.sequences[at] + 1) / max(price.ROOM_SHARE_MIN, left)
                best = min(best, cost + handoff + pressure)
    return best


nodes = st.sampled_from(NODES)
works = st.lists(st.tuples(st.floats(-3, 6), st.floats(0.01, 2)), max_size=4).map(tuple)
prefill_workers = st.lists(
    st.builds(P, st.uuids().map(str), nodes, tokens_per_s=st.sampled_from([1000.0, SLOW]), work=works, able=st.booleans()),
    min_size=1, max_size=5,
)  # fmt: skip
decode_workers = st.lists(
    st.builds(D, st.uuids().map(str), nodes, st.integers(0, 100), st.integers(0, 20), able=st.booleans()), min_size=1, max_size=5
)  # fmt: skip
lengths = st.dictionaries(nodes, st.integers(1, 20))


@settings(max_examples=200, deadline=None)
@given(
    prefill_workers, decode_workers, lengths, lengths, lengths, st.sampled_from([1e5, 1e7, 1e9]),
    st.sampled_from([1e-10, 1e-8, 1e-6]),
)  # fmt: skip
def test_ours_is_never_dearer_than_the_search_over_all_pairs(
    prefill: list[P], decode: list[D], prefixes: dict[str, int], dram: dict[str, int], promised: dict[str, int], link: float,
    ssd: float,
) -> None:  # fmt: skip
    seen = view(prefill, decode, prefixes, link=link, dram=dram, promised=promised, ssd_s_per_byte=ssd)
    choice = policy("ours").choose(NEED, seen)
    if isinstance(choice, Obstacle):
        assert not seen.prefill.able.any() or not price.fits(NEED, seen.decode).any()
        return
    expected = plain_cost(NEED, seen)
    # What it then loads while it waits can only make it cheaper.
    row, terms = choice.prefill, choice.terms
    found = price.ways(NEED, seen, price.soonest_source(NEED, seen))
    shortest = (found.load_s + found.compute_s).min(axis=0)
    waits, behind = price.waits(NEED, seen, np.full(len(prefill), shortest[row]))
    busy = float(seen.prefill.queue_s[seen.prefill.able].mean())
    crowd = busy / (busy + float(shortest[seen.prefill.able].mean()) + 1e-9)
    pressure = price.pressures(NEED, seen)[choice.decode]
    cost = terms.ttft_s + terms.compute_s * (float(behind[row]) + crowd) + terms.handoff_s + float(pressure)
    assert cost <= expected + 1e-6
    assert waits[row] <= terms.queue_s + 1e-9
