"""Slots that are being written: by clients, and by the node itself where a block arrives from a peer or from the SSD. Pure.

::

    reserve --> room? --no--> waits in line until its deadline
                  |yes
    slot reserved, key promised --commit--> block visible
                  |--abandon, goodbye, process dead--> slot free
                  |--silence--> slot quarantined until the process is gone or the client speaks

One key has one writer: a second one is told that there is nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.clients import Client
from kv_pool.node.messages import Abandon, Commit, ErrorCode, Refusal, Reserve, ReserveDenied, SlotsReserved, Tier, grant_row
from kv_pool.node.slots import Slots
from kv_pool.node.stimuli import Action, Send, SetEpoch
from kv_pool.settings import PoolSettings


@dataclass(slots=True)
class Reservation:
    """``client`` is None where the node itself writes: ``arriving``, a block from a peer, or None yet where the SSD is being
    read. ``parent`` is pinned meanwhile."""

    key: BlockKey
    parent: BlockKey | None
    private: bool
    client: Client | None
    arriving: Commit | None = None
    retention: int = 0
    tier: Tier = Tier.DRAM
    """Where the node had it that sent it."""


@dataclass(slots=True)
class WaitingReserve:
    client: Client
    request: Reserve
    deadline: float


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Who may still write to a quarantined slot."""

    client: str
    pid: int
    started: int


DISK: Final = Quarantine("", -1, -1)
"""A thread of the disk that hangs may still write here."""


class Writers:
    """``block_tokens`` is what a public block holds; None where any count will do."""

    def __init__(
        self, slots: Slots, blocks: Blocks, settings: PoolSettings, *, slot_bytes: int, block_tokens: int | None
    ) -> None:
        self._slots = slots
        self._blocks = blocks
        self._settings = settings
        self._slot_bytes = slot_bytes
        self._block_tokens = block_tokens
        self.reservations: dict[int, Reservation] = {}
        self.quarantined: dict[int, Quarantine] = {}
        self._slot_of: dict[BlockKey, int] = {}
        self._waiting: deque[WaitingReserve] = deque()
        self._retention = {name: number for number, name in enumerate(settings.retention_classes)} | {"": 0}
        self.draining = False
        self.refused = 0

    def writing(self, key: BlockKey) -> bool:
        return key in self._slot_of

    # --- clients ------------------------------------------------------------------------------------------------------------

    def reserve(self, client: Client, request: Reserve, now: float) -> list[Action]:
        if not client.pid:
            return self._deny(client, request, "writers must run on the node's machine")
        if len(request.keys) > self._slots.count:
            return self._deny(client, request, f"{len(request.keys)} blocks do not fit a pool of {self._slots.count}")
        if request.retention not in self._retention:
            return self._deny(
                client, request, f"retention: no such class, known are {', '.join(self._settings.retention_classes)}"
            )
        if self.draining and not request.private:
            return self._deny(client, request, "the node is being drained")
        if len(self._waiting) >= self._settings.waiting_acquires_max:
            return self._deny(client, request, "too many writers wait for room")
        self._waiting.append(WaitingReserve(client, request, now + request.timeout_s))
        return self.serve()

    def serve(self) -> list[Action]:
        """Grant what fits, in order of arrival: one that needs much is not passed for ever by those that need little."""
        actions: list[Action] = []
        while self._waiting:
            client, request = self._waiting[0].client, self._waiting[0].request
            wanted = [key for key in request.keys if not self._known(key)]
            with self._pinned((*request.keys, request.parent)):
                actions += self._make_room(len(wanted))
                if len(wanted) > self._slots.free:
                    break
                self._waiting.popleft()
                actions += self._grant(client, request)
        return actions

    def drain(self, *, enable: bool) -> list[Action]:
        """Take no new public blocks, also not of those that wait already; or take them again."""
        self.draining = enable
        refused = [w for w in self._waiting if enable and not w.request.private]
        self._waiting = deque(w for w in self._waiting if w not in refused)
        return [action for w in refused for action in self._deny(w.client, w.request, "the node is being drained")]

    def expire(self, now: float) -> list[Action]:
        """Turn away those whose deadline has passed."""
        late = [w for w in self._waiting if w.deadline <= now]
        self._waiting = deque(w for w in self._waiting if w.deadline > now)
        return [action for w in late for action in self._deny(w.client, w.request, "no room in the pool before the deadline")]

    def next_deadline(self) -> float | None:
        return min((w.deadline for w in self._waiting), default=None)

    def commit(self, client: Client, commit: Commit, now: float) -> tuple[BlockKey | None, list[Action]]:
        """The key that is visible now, or None."""
        reservation = self._held_by(client, commit.slot)
        if reservation is None or reservation.key != commit.key:
            return None, [Send(client.name, Refusal(ErrorCode.NOT_RESERVED))]
        whole = commit.tokens == self._block_tokens or self._block_tokens is None or reservation.private
        if commit.length > self._slot_bytes or not whole or self._blocks.loops(commit.key, commit.parent):
            return None, [*self._unreserve(commit.slot), Send(client.name, Refusal(ErrorCode.BAD_COMMIT))]
        return commit.key, self._store(commit.slot, commit, now)

    def abandon(self, client: Client, abandon: Abandon) -> tuple[BlockKey | None, list[Action]]:
        """The key that has no writer any more, or None."""
        reservation = self._held_by(client, abandon.slot)
        if reservation is None:
            return None, [Send(client.name, Refusal(ErrorCode.NOT_RESERVED))]
        return reservation.key, self._unreserve(abandon.slot)

    def forget(self, client: Client, *, may_write: bool) -> tuple[list[BlockKey], list[Action]]:
        """Take back a client's reservations; ``may_write`` where its process may still be in the middle of one. Returns the keys
        that have no writer any more."""
        self._waiting = deque(w for w in self._waiting if w.client is not client)
        keys: list[BlockKey] = []
        actions: list[Action] = []
        for slot in sorted(client.reservations):
            keys.append(self.reservations[slot].key)
            if may_write:
                self._drop(slot)
                self._slots.quarantine(slot)
                self.quarantined[slot] = Quarantine(client.name, client.pid, client.started)
            else:
                actions += self._unreserve(slot)
        return keys, actions

    def client_spoke(self, client: str) -> list[Action]:
        """A client that had fallen silent has come round, and writes no more."""
        return self._end_quarantine([slot for slot, q in self.quarantined.items() if q.client == client])

    def process_gone(self, pid: int, started: int) -> list[Action]:
        """A process of this machine has ended. (Pid 0 is anybody's elsewhere.)"""
        if pid <= 0:
            return []
        return self._end_quarantine([slot for slot, q in self.quarantined.items() if (q.pid, q.started) == (pid, started)])

    # --- blocks from peers --------------------------------------------------------------------------------------------------

    def land(self, arriving: Commit, *, private: bool, tier: Tier, retention: int) -> tuple[int | None, list[Action]]:
        """A slot for an arrived block, or None where it cannot be had. Its key must be new."""
        if arriving.length > self._slot_bytes or self._blocks.loops(arriving.key, arriving.parent):
            return None, []
        actions = self._make_room(1)
        if not self._slots.free:
            return None, actions
        slot, more = self._take(
            Reservation(arriving.key, arriving.parent, private, None, arriving, self._known_retention(retention), tier)
        )
        return slot, actions + more

    def landed(self, slot: int, *, sound: bool, now: float) -> tuple[BlockKey, Tier, list[Action]]:
        """The arrived block is in its slot: it becomes visible if it is sound, else the slot is free again. Also returns where
        its node had it."""
        reservation = self.reservations[slot]
        arriving = reservation.arriving
        assert arriving is not None
        return arriving.key, reservation.tier, self._store(slot, arriving, now) if sound else self._unreserve(slot)

    # --- blocks from the SSD ------------------------------------------------------------------------------------------------

    def take_for_load(self, key: BlockKey) -> tuple[int | None, list[Action]]:
        """A slot to read ``key`` into, or None where it cannot be had. The key must be new."""
        actions = self._make_room(1)
        if not self._slots.free:
            return None, actions
        slot, more = self._take(Reservation(key, None, False, None))
        return slot, actions + more

    def loaded(self, commit: Commit, retention: int, now: float) -> list[Action]:
        """The block that was read is in its slot, and sound."""
        self.reservations[commit.slot].retention = self._known_retention(retention)
        return self._store(commit.slot, commit, now)

    def not_loaded(self, slot: int) -> list[Action]:
        return self._unreserve(slot)

    def load_hangs(self, slot: int) -> None:
        """The disk has not answered, and may still write to the slot."""
        self._drop(slot)
        self._slots.quarantine(slot)
        self.quarantined[slot] = DISK

    def disk_let_go(self, slot: int) -> list[Action]:
        return self._end_quarantine([slot]) if slot in self.quarantined else []

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _known_retention(self, number: int) -> int:
        """A peer with other classes than ours, or a record of an earlier configuration, may name one that is not there: the first
        one, then."""
        return number if number < len(self._settings.retention_classes) else 0

    def _known(self, key: BlockKey) -> bool:
        return key in self._slot_of or self._blocks.get(key) is not None

    def _held_by(self, client: Client, slot: int) -> Reservation | None:
        return self.reservations[slot] if slot in client.reservations else None

    def _make_room(self, count: int) -> list[Action]:
        """Evict until ``count`` slots are free. Evicts nothing where that could not be enough: the cache is worth more."""
        actions: list[Action] = []
        if self._slots.free + self._blocks.idle < count:
            return actions
        while self._slots.free < count:
            evicted = self._blocks.evict_one()
            if evicted is None:
                break
            actions += evicted
        return actions

    @contextmanager
    def _pinned(self, keys: Iterable[BlockKey | None]) -> Generator[None]:
        """A chain is not shortened to make room for its own next block."""
        pinned = [key for key in keys if key is not None]
        for key in pinned:
            self._blocks.pin(key)
        try:
            yield
        finally:
            for key in pinned:
                self._blocks.unpin(key)

    def _grant(self, client: Client, request: Reserve) -> list[Action]:
        actions: list[Action] = []
        slots: list[int | None] = []
        parent = request.parent
        for key in request.keys:
            slot = None
            if not self._known(key):
                retention = self._retention[request.retention]
                slot, more = self._take(Reservation(key, parent, request.private, client, retention=retention))
                client.reservations.add(slot)
                actions += more
            slots.append(slot)
            parent = key
        return [*actions, Send(client.name, SlotsReserved(request.ticket, tuple(slots)))]

    def _take(self, reservation: Reservation) -> tuple[int, list[Action]]:
        slot = self._slots.take()
        self.reservations[slot] = reservation
        self._slot_of[reservation.key] = slot
        if reservation.parent is not None:
            self._blocks.pin(reservation.parent)
        return slot, [SetEpoch(slot, self._slots.epoch(slot))]

    def _drop(self, slot: int) -> Reservation:
        reservation = self.reservations.pop(slot)
        del self._slot_of[reservation.key]
        if reservation.client is not None:
            reservation.client.reservations.discard(slot)
        if reservation.parent is not None:
            self._blocks.unpin(reservation.parent)
        return reservation

    def _store(self, slot: int, commit: Commit, now: float) -> list[Action]:
        reservation = self._drop(slot)
        self._slots.commit(slot)
        private = reservation.private
        expires = now + self._settings.handoff_ttl_s if private else None
        row = grant_row(
            commit.key, commit.parent, slot, self._slots.epoch(slot), commit.tokens, commit.length, commit.checksum,
            private=private, retention=reservation.retention,
        )  # fmt: skip
        block = Block(
            commit.key, slot, commit.parent, commit.tokens, commit.length, commit.checksum, commit.meta, now, row,
            reservation.retention, expires,
        )  # fmt: skip
        return self._blocks.store(block)

    def _unreserve(self, slot: int) -> list[Action]:
        self._drop(slot)
        self._slots.give_back(slot)
        return [SetEpoch(slot, self._slots.epoch(slot))]

    def _end_quarantine(self, slots: list[int]) -> list[Action]:
        actions: list[Action] = []
        for slot in slots:
            del self.quarantined[slot]
            self._slots.give_back(slot)
            actions.append(SetEpoch(slot, self._slots.epoch(slot)))
        return actions

    def _deny(self, client: Client, request: Reserve, reason: str) -> list[Action]:
        self.refused += 1
        return [Send(client.name, ReserveDenied(request.ticket, reason))]

    # --- for tests ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that all tables tell the same."""
        assert {r.key: slot for slot, r in self.reservations.items()} == self._slot_of
        for slot, reservation in self.reservations.items():
            assert self._blocks.get(reservation.key) is None
            assert reservation.client is None or slot in reservation.client.reservations
        assert all(slot not in self.reservations for slot in self.quarantined)
        assert len(self._waiting) <= self._settings.waiting_acquires_max

    def pins(self) -> dict[BlockKey, int]:
        pins: dict[BlockKey, int] = {}
        for reservation in self.reservations.values():
            if reservation.parent is not None:
                pins[reservation.parent] = pins.get(reservation.parent, 0) + 1
        return pins
