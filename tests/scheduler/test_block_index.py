"""The index converges to what the nodes have, whatever happens to their events on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_scene import FakeNode, FakeSnapshot, keys_of, lengths

from kv_pool.events.types import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from scheduler.block_table import MASKS_MIN, MEDIA_MAX, ONE_BY_ONE_MAX, BlockTable
from scheduler.index import WAITING_MAX, BlockIndex

KEYS = keys_of("doc", 8)


def leading(table: BlockTable, keys: Sequence[BlockKey]) -> dict[int, int]:
    """Leading ``keys`` by slot, without those that have none."""
    return {slot: count for slot, count in enumerate(table.prefixes(keys)[0].tolist()) if count}


def synced(*nodes: FakeNode) -> BlockIndex:
    index = BlockIndex()
    for node in nodes:
        index.node_up(node.id, node.incarnation)
        index.load(node.snapshot())
    return index


def test_longest_prefix_counts_leading_keys_without_a_hole_over_all_media() -> None:
    table = BlockTable(100)
    assert [table.open() for _ in range(3)] == [0, 1, 2]
    table.add(0, "dram", KEYS)
    table.add(1, "dram", KEYS[:2])
    table.add(1, "ssd", KEYS[2:3])
    table.add(1, "dram", KEYS[4:])  # behind a hole
    table.add(2, "dram", KEYS[1:])  # without the first
    assert leading(table, KEYS) == {0: 8, 1: 3}
    assert leading(table, ()) == {}
    assert leading(table, keys_of("other", 3)) == {}
    assert table.holders(KEYS[2]) == [(0, "dram"), (1, "ssd"), (2, "dram")]


def test_the_table_is_bounded_and_counts_what_it_leaves_out() -> None:
    table = BlockTable(5)
    slot, other = table.open(), table.open()
    table.add(slot, "dram", KEYS)
    assert (table.entries, table.dropped) == (5, 3)
    assert leading(table, KEYS) == {slot: 5}
    table.add(other, "ssd", KEYS[:5])
    assert (table.entries, table.dropped) == (10, 3), "what is known already costs no room"
    table.close(other)
    table.discard(slot, "dram", KEYS)
    assert table.entries == 0
    for medium in range(MEDIA_MAX + 3):
        table.add(slot, f"m{medium}", KEYS[:1])
    assert table.dropped == 8
    table.close(slot)
    assert (table.entries, table.holders(KEYS[0])) == (0, [])
    assert table.open() == slot
    assert table.count(slot) == 0


@pytest.mark.parametrize("many", [1, 3 * ONE_BY_ONE_MAX])
def test_what_a_node_that_is_gone_had_makes_room_for_others(many: int) -> None:
    table = BlockTable(10)
    gone, here = table.open(), table.open()
    table.add(gone, "dram", keys_of("gone", 10))
    table.add(here, "dram", keys_of("gone", 4))
    table.close(gone)
    assert leading(table, keys_of("gone", 10)) == {here: 4}
    table.add(here, "dram", keys_of("new", 6)[:many])
    table.add(here, "dram", keys_of("new", 6 + many))
    assert (table.entries, table.dropped) == (10, many)
    assert leading(table, keys_of("new", 6 + many)) == {here: 6}


def test_what_comes_before_the_first_block_on_a_slower_medium_is_told_apart() -> None:
    table = BlockTable(100)
    a, b, c = (table.open() for _ in range(3))
    table.add(a, "ssd", KEYS)
    table.add(a, "dram", KEYS[2:5])
    table.add(b, "dram", KEYS[:3])
    table.add(b, "other", KEYS[2:4])
    table.add(c, "ssd", KEYS[1:])
    assert leading(table, KEYS) == {a: 8, b: 4}
    table.add(a, "dram", KEYS[:1])
    assert [before.tolist() for before in table.prefixes(KEYS)] == [[8, 4, 0, 0], [1, 3, 0, 0]]
    assert [before.tolist() for before in table.prefixes(KEYS[:3])] == [[3, 3, 0, 0], [1, 3, 0, 0]]
    assert [before.tolist() for before in table.prefixes(())] == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_masks_that_nothing_has_any_more_are_forgotten() -> None:
    table = BlockTable(10_000)
    held = keys_of("all", 12)
    slots = [table.open() for _ in range(12)]
    for number in range(2**12):  # every set of nodes once
        for i, slot in enumerate(slots):
            change = table.add if number >> i & 1 else table.discard
            change(slot, "dram", held[:1])
    assert len(table._masks) <= MASKS_MIN + 2
    assert table.holders(held[0]) == [(slot, "dram") for slot in slots]
    for _ in range(3 * MASKS_MIN):  # the last node comes and goes
        table.add(slots[-1], "dram", held)
        table.close(slots[-1])
        slots[-1] = table.open()
    assert len(table._masks) <= MASKS_MIN + 2
    assert leading(table, held) == dict.fromkeys(slots[:-1], 1)


table_steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "discard", "close"]), st.integers(0, 3), st.sampled_from(["dram", "ssd"]),
        st.sets(st.integers(0, 11)), st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


@given(table_steps)
def test_it_says_what_the_obvious_sets_say(steps: list[tuple[str, int, str, set[int], bool]]) -> None:
    keys, padding = keys_of("twin", 12), keys_of("pad", ONE_BY_ONE_MAX)
    table = BlockTable(100_000)
    slots = [table.open() for _ in range(4)]
    twin: dict[tuple[int, str], set[BlockKey]] = {}
    for what, node, medium, numbers, many in steps:
        chosen = [*(keys[i] for i in sorted(numbers, reverse=True)), *(padding if many else ())]
        mine = twin.setdefault((node, medium), set())
        match what:
            case "add":
                table.add(slots[node], medium, chosen)
                mine.update(chosen)
            case "discard":
                table.discard(slots[node], medium, chosen)
                mine.difference_update(chosen)
            case _:
                table.close(slots[node])
                slots[node] = table.open()
                twin = {place: held for place, held in twin.items() if place[0] != node}
        assert table.entries == sum(len(held) for held in twin.values())
        expected = {slots[node]: counts for node in range(4) if (counts := twin_counts(keys, twin, node))}
        assert leading(table, keys) == {slot: sum(counts.values()) for slot, counts in expected.items()}
        in_dram = [twin.get((node, "dram"), set()) for node in range(4)]
        first = {slots[n]: next((i for i, key in enumerate(keys) if key not in in_dram[n]), len(keys)) for n in range(4)}
        assert {slot: table.prefixes(keys)[1][slot] for slot in slots} == first
    for key in (*keys, padding[0]):
        holding = [(slots[node], medium) for (node, medium), held in twin.items() if key in held]
        assert table.holders(key) == sorted(holding)


def twin_counts(keys: Sequence[BlockKey], twin: dict[tuple[int, str], set[BlockKey]], node: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key in keys:
        medium = next((m for m in ("dram", "ssd") if key in twin.get((node, m), ())), None)
        if medium is None:
            break
        counts[medium] = counts.get(medium, 0) + 1
    return counts


def test_a_lost_batch_is_noticed_by_the_next_and_repaired_by_a_snapshot() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    lost, seen = node.stored(KEYS[:2]), node.stored(KEYS[2:4])
    index.apply(seen)
    assert index.wanted == {"n0"}
    assert lengths(index, KEYS) == {}
    index.load(node.snapshot())
    assert index.wanted == set()
    assert lengths(index, KEYS) == {"n0": 4}
    index.apply(lost)  # late
    index.apply(seen)  # repeated
    assert lengths(index, KEYS) == {"n0": 4}
    assert index.ignored == 2


def test_batches_that_overtook_each_other_need_no_snapshot() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    first, second, third = node.stored(KEYS[:2]), node.removed(KEYS[1:2]), node.stored(KEYS[1:3])
    for batch in (third, second, first):
        index.apply(batch)
    assert lengths(index, KEYS) == {"n0": 3}
    assert index.wanted == set()


def test_batches_that_came_while_the_snapshot_was_on_its_way_are_applied_behind_it() -> None:
    node = FakeNode("n0", "a")
    index = BlockIndex()
    index.node_up("n0", "a")
    early = node.stored(KEYS[:4])
    snapshot = node.snapshot()
    late = node.removed(KEYS[3:4])
    for batch in (late, early):
        index.apply(batch)
    assert lengths(index, KEYS) == {}
    index.load(snapshot)
    assert lengths(index, KEYS) == {"n0": 3}
    assert index.wanted == set()


def test_a_snapshot_older_than_the_events_applied_is_ignored() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    old = node.snapshot()
    index.apply(node.stored(KEYS[:2]))
    index.load(old)
    assert lengths(index, KEYS) == {"n0": 2}


def test_a_loss_that_no_later_batch_shows_is_found_by_two_heartbeats() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    lost = node.stored(KEYS[:2])
    index.node_told("n0", lost.sequence)
    assert index.wanted == set(), "the heartbeat may have overtaken the batch"
    index.node_told("n0", lost.sequence)
    assert index.wanted == {"n0"}
    index.load(node.snapshot())
    index.node_told("n0", lost.sequence)
    assert index.wanted == set()


def test_another_incarnation_starts_from_nothing_and_the_old_one_is_not_heard() -> None:
    old, other = FakeNode("n0", "a"), FakeNode("n1", "a")
    index = synced(old, other)
    index.apply(old.stored(KEYS))
    index.apply(other.stored(KEYS[:1]))
    index.node_up("n0", "b")
    assert lengths(index, KEYS) == {"n1": 1}
    assert index.wanted == {"n0"}
    index.apply(old.stored(KEYS))
    index.load(old.snapshot())
    assert lengths(index, KEYS) == {"n1": 1}
    index.node_gone("n0")
    index.node_gone("n1")
    index.node_gone("n2")
    assert (index.entries, index.wanted) == (0, set())


def test_a_cleared_node_has_nothing() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    index.apply(node.stored(KEYS))
    index.apply(EventBatch(node.sequence + 1, "n0", "a", 0.0, (AllBlocksCleared(), BlockStored(KEYS[:1], None, 64, "dram"))))
    assert lengths(index, KEYS) == {"n0": 1}
    assert index.blocks("n0") == 1


def test_what_waits_behind_a_gap_is_bounded() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    lost = node.stored(KEYS[:1])
    for _ in range(WAITING_MAX + 5):
        index.apply(node.stored(KEYS[1:2]))
    index.apply(lost)
    assert index.wanted == {"n0"}, "the oldest of those that waited gave way"
    index.load(node.snapshot())
    assert lengths(index, KEYS) == {"n0": 2}
    assert index.wanted == set()


@dataclass
class TwinNode:
    """The dumb twin: its truth in two media, and its latest batches, to be told once more."""

    id: str
    incarnation: str
    keys: dict[str, frozenset[BlockKey]] = field(default_factory=lambda: {"dram": frozenset(), "ssd": frozenset()})
    log: list[EventBatch] = field(default_factory=list)

    @property
    def sequence(self) -> int:
        return len(self.log) - 1

    def random_batch(self, random: random.Random) -> EventBatch:
        events = tuple(self._random_event(random) for _ in range(random.randrange(1, 3)))
        self.log.append(EventBatch(len(self.log), self.id, self.incarnation, 0.0, events))
        return self.log[-1]

    def replay(self, random: random.Random) -> list[EventBatch]:
        """A range of what was told, as a node answers who asks for it."""
        first = random.randrange(len(self.log) + 1)
        return self.log[first : random.randrange(first, len(self.log) + 1)]

    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot(self.id, self.incarnation, self.sequence, dict(self.keys))

    def holds(self, key: BlockKey) -> list[str]:
        return [medium for medium, keys in self.keys.items() if key in keys]

    def by_medium(self) -> dict[str, int]:
        return twin_counts(KEYS, {(0, medium): set(keys) for medium, keys in self.keys.items()}, 0)

    def _random_event(self, random: random.Random) -> BlockEvent:
        some = tuple(key for key in KEYS if random.random() < 0.4)
        medium = random.choice(["dram", "ssd"])
        match random.randrange(8):
            case 0:
                self.keys = {"dram": frozenset(), "ssd": frozenset()}
                return AllBlocksCleared()
            case 1 | 2 | 3:
                self.keys[medium] -= set(some)
                return BlockRemoved(some, medium)
            case _:
                self.keys[medium] |= set(some)
                return BlockStored(some, None, 64, medium)


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_converges_whatever_is_lost_late_or_repeated(random: random.Random, steps: int) -> None:
    """Nodes change on two media and restart; batches, replayed ranges and snapshots are dropped, doubled, shuffled, and those of
    dead incarnations come late. Once the nodes have told their sequence twice and the snapshots wanted then have come, the index
    is what the nodes have."""
    nodes = {f"n{i}": TwinNode(f"n{i}", "0") for i in range(3)}
    index = BlockIndex()
    flying: list[EventBatch | FakeSnapshot] = []
    for node in nodes.values():
        index.node_up(node.id, node.incarnation)
    for step in range(steps):
        node = random.choice(list(nodes.values()))
        match random.randrange(12):
            case 0:
                nodes[node.id] = node = TwinNode(node.id, str(step + 1))
                index.node_up(node.id, node.incarnation)
            case 1:
                index.node_told(node.id, node.sequence)
            case 2 | 3:
                flying += [nodes[wanted].snapshot() for wanted in index.wanted]
            case 4:
                flying += node.replay(random)
            case 5 if random.random() < 0.2:
                index.node_gone(node.id)
                index.node_up(node.id, node.incarnation)
            case _:
                flying.append(node.random_batch(random))
        random.shuffle(flying)
        for message in flying[: random.randrange(4)]:
            index.apply(message) if isinstance(message, EventBatch) else index.load(message)
        fates = [random.random() for _ in flying]
        flying = [message for message, fate in zip(flying, fates, strict=True) if fate > 0.3]
    for _ in range(2):
        for node in nodes.values():
            index.node_told(node.id, node.sequence)
    for wanted in list(index.wanted):
        index.load(nodes[wanted].snapshot())
    assert index.wanted == set()
    assert lengths(index, KEYS) == {n.id: sum(n.by_medium().values()) for n in nodes.values() if n.by_medium()}
    assert index.entries == sum(len(keys) for node in nodes.values() for keys in node.keys.values())
    assert all(index.holders(key) == [(n.id, medium) for n in nodes.values() for medium in n.holds(key)] for key in KEYS)
    assert [index.blocks(n.id) for n in nodes.values()] == [sum(map(len, n.keys.values())) for n in nodes.values()]


def test_removal_of_what_was_never_there_changes_nothing() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    index.apply(EventBatch(0, "n0", "a", 0.0, (BlockRemoved(KEYS, "dram"), BlockRemoved(KEYS, "ssd"))))
    assert index.entries == 0
