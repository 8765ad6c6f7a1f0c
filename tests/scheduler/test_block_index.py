"""The index converges to what the nodes have, whatever happens to their events on the way."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_scene import FakeNode, FakeSnapshot, keys_of

from kv_pool.events.types import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from scheduler.block_table import MEDIA_MAX, BlockTable
from scheduler.index import WAITING_MAX, BlockIndex

KEYS = keys_of("doc", 8)


def synced(*nodes: FakeNode) -> BlockIndex:
    index = BlockIndex()
    for node in nodes:
        index.node_up(node.id, node.incarnation)
        index.load(node.snapshot())
    return index


def test_longest_prefix_counts_leading_keys_without_a_hole_over_all_media() -> None:
    table = BlockTable(100)
    table.add(0, "dram", KEYS)
    table.add(1, "dram", KEYS[:2])
    table.add(1, "ssd", KEYS[2:3])
    table.add(1, "dram", KEYS[4:])  # behind a hole
    table.add(2, "dram", KEYS[1:])  # without the first
    assert table.longest_prefix(KEYS) == {0: 8, 1: 3}
    assert table.longest_prefix(()) == {}
    assert table.longest_prefix(keys_of("other", 3)) == {}
    assert table.holders(KEYS[2]) == [(0, "dram"), (1, "ssd"), (2, "dram")]


def test_the_table_is_bounded_and_counts_what_it_leaves_out() -> None:
    table = BlockTable(5)
    table.add(0, "dram", KEYS)
    assert (table.entries, table.dropped) == (5, 3)
    assert table.longest_prefix(KEYS) == {0: 5}
    table.discard(0, "dram", KEYS)
    assert table.entries == 0
    for medium in range(MEDIA_MAX + 3):
        table.add(0, f"m{medium}", KEYS[:1])
    assert table.dropped > 3
    table.clear(0)
    assert (table.entries, table.holders(KEYS[0]), table.count(0)) == (0, [], 0)


def test_a_lost_batch_is_noticed_by_the_next_and_repaired_by_a_snapshot() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    lost, seen = node.stored(KEYS[:2]), node.stored(KEYS[2:4])
    index.apply(seen)
    assert index.wanted == {"n0"}
    assert index.longest_prefix(KEYS) == {}
    index.load(node.snapshot())
    assert index.wanted == set()
    assert index.longest_prefix(KEYS) == {"n0": 4}
    index.apply(lost)  # late
    index.apply(seen)  # repeated
    assert index.longest_prefix(KEYS) == {"n0": 4}
    assert index.ignored == 2


def test_batches_that_overtook_each_other_need_no_snapshot() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    first, second, third = node.stored(KEYS[:2]), node.removed(KEYS[1:2]), node.stored(KEYS[1:3])
    for batch in (third, second, first):
        index.apply(batch)
    assert index.longest_prefix(KEYS) == {"n0": 3}
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
    assert index.longest_prefix(KEYS) == {}
    index.load(snapshot)
    assert index.longest_prefix(KEYS) == {"n0": 3}
    assert index.wanted == set()


def test_a_snapshot_older_than_the_events_applied_is_ignored() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    old = node.snapshot()
    index.apply(node.stored(KEYS[:2]))
    index.load(old)
    assert index.longest_prefix(KEYS) == {"n0": 2}


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
    assert index.longest_prefix(KEYS) == {"n1": 1}
    assert index.wanted == {"n0"}
    index.apply(old.stored(KEYS))
    index.load(old.snapshot())
    assert index.longest_prefix(KEYS) == {"n1": 1}
    index.node_gone("n0")
    index.node_gone("n1")
    index.node_gone("n2")
    assert (index.entries, index.wanted) == (0, set())


def test_a_cleared_node_has_nothing() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    index.apply(node.stored(KEYS))
    index.apply(EventBatch(node.sequence + 1, "n0", "a", 0.0, (AllBlocksCleared(), BlockStored(KEYS[:1], None, 64, "dram"))))
    assert index.longest_prefix(KEYS) == {"n0": 1}
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
    assert index.longest_prefix(KEYS) == {"n0": 2}
    assert index.wanted == set()


class TwinNode(FakeNode):
    """The dumb twin: remembers its truth at every sequence."""

    def random_batch(self, random: random.Random) -> EventBatch:
        some = [key for key in KEYS if random.random() < 0.4]
        match random.randrange(5):
            case 0:
                self.keys = frozenset()
                self.sequence += 1
                return EventBatch(self.sequence, self.id, self.incarnation, 0.0, (AllBlocksCleared(),))
            case 1 | 2:
                return self.removed(some)
            case _:
                return self.stored(some)


def twin_prefix(keys: frozenset[BlockKey]) -> int:
    return next((i for i, key in enumerate(KEYS) if key not in keys), len(KEYS))


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_converges_whatever_is_lost_late_or_repeated(random: random.Random, steps: int) -> None:
    """Nodes change and restart; batches and snapshots are dropped, doubled, shuffled. Once the nodes have told their sequence
    twice and the snapshots wanted then have come, the index is what the nodes have."""
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
    assert index.longest_prefix(KEYS) == {n.id: twin_prefix(n.keys) for n in nodes.values() if twin_prefix(n.keys)}
    assert index.entries == sum(len(node.keys) for node in nodes.values())
    assert all(index.holders(key) == [(n.id, "dram") for n in nodes.values() if key in n.keys] for key in KEYS)


def test_removal_of_what_was_never_there_changes_nothing() -> None:
    node = FakeNode("n0", "a")
    index = synced(node)
    index.apply(EventBatch(0, "n0", "a", 0.0, (BlockRemoved(KEYS, "dram"), BlockRemoved(KEYS, "ssd"))))
    assert index.entries == 0
