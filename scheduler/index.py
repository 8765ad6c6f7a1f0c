"""The cluster-wide block index: which node has which block, kept from the nodes' ordered events. Pure soft state.

Per node a *replica* of its key set. A node numbers its event batches, and the incarnation names its process::

    batches     1 2 3 4 | 5 6 . 8 9          . = lost
                applied ^ ^ ^   ^ ^
                next = 7       waiting = {8, 9}, a snapshot is wanted
    snapshot of sequence 9 -> keys replaced, next = 10, nothing waits

=========  ====================================================================================================
batch      what happens
=========  ====================================================================================================
next       applied, then those that waited behind it
earlier    a repetition: ignored
later      waits (at most ``WAITING_MAX``, the oldest give way); a snapshot is wanted
stranger   unknown node or another incarnation: ignored
=========  ====================================================================================================

While a snapshot is wanted the old keys stay: a stale entry costs a typed "not found" and a recompute, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kv_pool.events.types import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from scheduler.block_table import BlockTable, Ints

ENTRIES_MAX: Final = 8_000_000
"""Different blocks, each of them on any number of nodes and media."""
WAITING_MAX: Final = 1024


class NodeSnapshot(Protocol):
    """All keys of one node as they were after its batch ``sequence`` (-1 before its first)."""

    @property
    def node_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def keys_by_medium(self) -> Mapping[str, Collection[BlockKey]]: ...


@dataclass(slots=True)
class _Replica:
    """``next`` is the sequence expected, None before the first snapshot. ``told`` is the sequence that the node named in its last
    heartbeat."""

    slot: int
    incarnation: str
    next: int | None = None
    waiting: dict[int, Sequence[BlockEvent]] = field(default_factory=dict[int, Sequence[BlockEvent]])
    told: int = -1


class BlockIndex:
    """``wanted`` are the nodes of which a snapshot is needed; the owner fetches them at its own pace."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self.wanted: set[str] = set()
        self.ignored = 0
        """Batches and snapshots that did not count."""
        self._table = BlockTable(entries_max)
        self._replicas: dict[str, _Replica] = {}
        self._node_at: dict[int, str] = {}

    # --- nodes ----------------------------------------------------------------------------------------------------------

    def node_up(self, node_id: str, incarnation: str) -> None:
        """A node process is there. Another incarnation than before starts from nothing; the same one changes nothing."""
        known = self._replicas.get(node_id)
        if known is not None and known.incarnation == incarnation:
            return
        self.node_gone(node_id)
        self._replicas[node_id] = _Replica(self._open(node_id), incarnation)
        self.wanted.add(node_id)

    def node_gone(self, node_id: str) -> None:
        """Nothing of the node can be fetched any more."""
        replica = self._replicas.pop(node_id, None)
        self.wanted.discard(node_id)
        if replica is not None:
            self._close(replica)

    def node_told(self, node_id: str, sequence: int) -> None:
        """The node's heartbeat names its last batch: shows a loss that no later batch would. One that is ahead of the events may
        have overtaken them; if the events have not caught up by the next heartbeat, they are lost."""
        replica = self._replicas.get(node_id)
        if replica is None or replica.next is None:
            return
        if replica.told >= replica.next:
            self.wanted.add(node_id)
        replica.told = sequence

    # --- events ---------------------------------------------------------------------------------------------------------

    def apply(self, batch: EventBatch) -> None:
        """Take one event batch, in whatever order and however often it comes."""
        replica = self._known(batch.node_id, batch.incarnation)
        if replica is None or (replica.next is not None and batch.sequence < replica.next):
            self.ignored += 1
            return
        replica.waiting[batch.sequence] = batch.events
        if len(replica.waiting) > WAITING_MAX:
            del replica.waiting[min(replica.waiting)]
        self._catch_up(batch.node_id, replica)

    def load(self, snapshot: NodeSnapshot) -> None:
        """Replace what is known of a node. A snapshot older than the events applied since is ignored."""
        replica = self._known(snapshot.node_id, snapshot.incarnation)
        if replica is None or (replica.next is not None and snapshot.sequence + 1 < replica.next):
            self.ignored += 1
            return
        self._start_anew(snapshot.node_id, replica)
        for medium, keys in snapshot.keys_by_medium.items():
            self._table.add(replica.slot, medium, keys)
        replica.next = snapshot.sequence + 1
        for sequence in [s for s in replica.waiting if s < replica.next]:
            del replica.waiting[sequence]
        self._catch_up(snapshot.node_id, replica)

    # --- questions ------------------------------------------------------------------------------------------------------

    def prefixes(self, keys: Sequence[BlockKey]) -> tuple[Ints, Ints]:
        """By slot (:meth:`slot_of`), with a zero behind the last: how many of the leading ``keys`` the node has without a hole,
        and how many of these come before the first that it has on slower media only."""
        return self._table.prefixes(keys)

    def slot_of(self, node_id: str) -> int:
        """The place of a node in what :meth:`prefixes` gives, -1 for one that is not known. Stays until the node is gone."""
        replica = self._replicas.get(node_id)
        return -1 if replica is None else replica.slot

    def node_at(self, slot: int) -> str:
        return self._node_at[slot]

    def holders(self, key: BlockKey) -> list[tuple[str, str]]:
        """All (node id, medium) that are believed to have ``key``."""
        return sorted((self._node_at[slot], medium) for slot, medium in self._table.holders(key))

    def blocks(self, node_id: str) -> int:
        """Entries known of one node, over all media."""
        replica = self._replicas.get(node_id)
        return 0 if replica is None else self._table.count(replica.slot)

    @property
    def entries(self) -> int:
        return self._table.entries

    @property
    def dropped(self) -> int:
        """Entries that did not fit."""
        return self._table.dropped

    @property
    def bytes_used(self) -> int:
        """Memory of what grows with the number of blocks."""
        return self._table.bytes_used

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _known(self, node_id: str, incarnation: str) -> _Replica | None:
        replica = self._replicas.get(node_id)
        return replica if replica is not None and replica.incarnation == incarnation else None

    def _catch_up(self, node_id: str, replica: _Replica) -> None:
        """Apply what waits as far as it follows on; what still waits shows a gap."""
        if replica.next is None:
            return
        while replica.next in replica.waiting:
            self._apply_events(node_id, replica, replica.waiting.pop(replica.next))
            replica.next += 1
        if replica.waiting:
            self.wanted.add(node_id)
        else:
            self.wanted.discard(node_id)

    def _apply_events(self, node_id: str, replica: _Replica, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._table.add(replica.slot, event.medium, event.keys)
                case BlockRemoved():
                    self._table.discard(replica.slot, event.medium, event.keys)
                case AllBlocksCleared():
                    self._start_anew(node_id, replica)

    def _open(self, node_id: str) -> int:
        slot = self._table.open()
        self._node_at[slot] = node_id
        return slot

    def _close(self, replica: _Replica) -> None:
        self._table.close(replica.slot)
        del self._node_at[replica.slot]

    def _start_anew(self, node_id: str, replica: _Replica) -> None:
        """The node has nothing."""
        self._close(replica)
        replica.slot = self._open(node_id)
