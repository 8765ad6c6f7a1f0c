"""Workers and pool nodes by their heartbeats: who joins, restarts, falls silent, is given up, comes back. Pure.

Giving a worker up raises its fence: whatever it does under the old one no longer counts, and it hears so in the reply to its
first word. A restart is another incarnation: what the old process had is dropped, and the old process is never listened to again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.assignments import Assignments
from scheduler.columns import DecodeColumns, PrefillColumns
from scheduler.index import BlockIndex
from scheduler.members import DecodeWorker, Member, Node, PrefillWorker, Standing, Worker
from scheduler.messages import Action, Follow, NodeReport, Notice, Reply, Unfollow, WorkerReport
from scheduler.plan import SchedulerSettings
from scheduler.prefill_queue import PrefillQueue
from scheduler.promises import Promises
from scheduler.recollection import Recollection
from scheduler.routing.links import LinkSpeeds
from scheduler.routing.load_speed import LoadSpeeds
from scheduler.routing.senders import Senders
from scheduler.routing.view import Bools, DecodeView, PrefillView
from scheduler.speeds import Speeds

MEMBERS_MAX: Final = 8192
FORGET_DEAD_S: Final = 3600.0
"""A dead member is remembered (with its fence) for this long, unless the room is needed."""


class Fleet:
    """All members. Ends the requests of those that are given up, and purges the index of nodes that are gone, and what was
    believed of them. The columns that routing reads are kept equal to the members (:meth:`touch`)."""

    def __init__(self, settings: SchedulerSettings, index: BlockIndex, promises: Promises, counters: Counter[str]) -> None:
        self.nodes: dict[str, Node] = {}
        self.prefill: dict[str, PrefillWorker] = {}
        self.decode: dict[str, DecodeWorker] = {}
        self.block_bytes = 0
        self.links = LinkSpeeds(settings.link_bytes_per_s)
        self.senders = Senders()
        self._recollection = Recollection(self.links, index)
        self.assignments = Assignments(settings.request_life_s, promises, self.touch)
        self._settings = settings
        self._index = index
        self._promises = promises
        self._counters = counters
        self._prefill_columns = PrefillColumns()
        self._decode_columns = DecodeColumns()
        self._at_node: dict[str, dict[str, Worker]] = {}
        self._node_heard_at = np.full(8, -np.inf)
        """By index slot, of nodes that can be counted on."""

    # --- questions ------------------------------------------------------------------------------------------------------

    def worker(self, worker_id: str) -> Worker | None:
        return self.prefill.get(worker_id) or self.decode.get(worker_id)

    def workers(self) -> Iterator[Worker]:
        yield from self.prefill.values()
        yield from self.decode.values()

    def standing(self, worker: Worker, now: float) -> Standing:
        return worker.standing(self.nodes.get(worker.node_id), now, self._settings.suspect_after_s)

    def live_sources(self, now: float, slots: int) -> Bools:
        """By slot, with one more at the end: pool nodes that blocks can be pulled from. One that is being drained takes no more
        blocks, so neither it nor its workers are planned with."""
        live = np.zeros(slots, np.bool_)
        known = min(slots, len(self._node_heard_at))
        live[:known] = self._node_heard_at[:known] >= now - self._settings.suspect_after_s
        return live

    def prefill_view(self, now: float, avoid: Iterable[str]) -> PrefillView:
        columns = self._prefill_columns
        return columns.view(now, columns.able(now, self._settings.suspect_after_s, avoid))

    def decode_view(self, now: float, avoid: Iterable[str]) -> DecodeView:
        columns = self._decode_columns
        return columns.view(columns.able(now, self._settings.suspect_after_s, avoid))

    def touch(self, worker: Worker) -> None:
        """Something about ``worker`` has changed."""
        node, slot = self.nodes.get(worker.node_id), self._index.slot_of(worker.node_id)
        match worker:
            case PrefillWorker() if self.prefill.get(worker.id) is worker:
                self._prefill_columns.put(worker, node, slot)
            case DecodeWorker() if self.decode.get(worker.id) is worker:
                self._decode_columns.put(worker, node, slot)
            case _:
                pass  # it has a successor already

    # --- what was learnt ------------------------------------------------------------------------------------------------

    def recall(self, speeds: Speeds) -> None:
        """Take what an earlier scheduler had learnt as first guesses."""
        self._recollection.recall(speeds, self.workers(), self.nodes)
        for worker in self.workers():
            self.touch(worker)

    def learnt(self) -> Speeds:
        """What is worth keeping for a later scheduler. Changes nothing."""
        return self._recollection.learnt(self.prefill, self.decode, self.nodes)

    # --- heartbeats -----------------------------------------------------------------------------------------------------

    def worker_heard(self, report: WorkerReport, now: float) -> tuple[Worker | None, list[Action]]:
        """One heartbeat of a worker: the worker (None for one that does not count) and the actions, its reply first."""
        known = self.worker(report.worker_id)
        if known is not None and report.incarnation in known.retired:
            self._counters["reports_retired"] += 1
            return None, [Reply(report.fence + 1)]
        if known is not None and known.incarnation == report.incarnation and not _fits(known, report):
            self._counters["reports_contradictory"] += 1
            return None, [Reply(report.fence)]
        actions: list[Action] = []
        if known is None or known.incarnation != report.incarnation:
            if known is None and not self._make_room():
                self._counters["members_refused"] += 1
                return None, [Reply(report.fence)]
            known = self._joined(report, known, now, actions)
        known.heard_at = now
        self._move(known, report.node_id)
        known.adopted_fence = report.fence
        known.fence = max(known.fence, report.fence)
        if known.dead and known.adopted_fence == known.fence:
            known.dead = False
            known.ramp.begin(now)
            actions.append(Notice("up", known.id, known.incarnation))
        reply = self._reply(known, now)
        self.touch(known)
        return known, [reply, *actions]

    def node_heard(self, report: NodeReport, now: float) -> list[Action]:
        """One heartbeat of a pool node; the reply comes first."""
        known, load = self.nodes.get(report.node_id), report.load
        if known is not None and report.incarnation in known.retired:
            self._counters["reports_retired"] += 1
            return [Reply(0)]
        actions: list[Action] = [Reply(0)]
        if known is None or known.incarnation != report.incarnation:
            if known is None and not self._make_room():
                self._counters["members_refused"] += 1
                return actions
            node = Node(report.node_id, report.incarnation, now, dead=True)
            if known is not None:
                actions += self._node_lost(known)
                _succeed(known, node)
            known = self.nodes[report.node_id] = node
        if known.dead or known.events != load.events:
            if not known.dead:
                actions.append(Unfollow(known.events))
            actions.append(Follow(load.events))
        known.dead, known.heard_at = False, now
        known.endpoint, known.events, known.local = load.endpoint, load.events, load.local
        known.draining = load.draining
        known.slots_total, known.slots_free, known.slot_bytes = load.slots_total, load.slots_free, load.slot_bytes
        self.block_bytes = load.slot_bytes or self.block_bytes
        joins = self._index.slot_of(known.id) < 0
        self._index.node_up(known.id, known.incarnation)
        if joins:
            self._recollection.node_joined(known.id)
        if load.sequence is not None:
            self._index.node_told(known.id, load.sequence)
        for source, size, seconds in load.pulls:
            self.links.observe(self._index.slot_of(source), self._index.slot_of(known.id), size, seconds)
        self._touch_node(known)
        return actions

    # --- time -----------------------------------------------------------------------------------------------------------

    def forgive(self, seconds: float, now: float) -> None:
        """Nobody could be heard for ``seconds``: silence starts to count from here."""
        for member in (*self.nodes.values(), *self.workers()):
            if not member.dead:
                member.heard_at = min(now, member.heard_at + seconds)
        for node in self.nodes.values():
            self._touch_node(node)
        for worker in self.workers():
            self.touch(worker)

    def bury(self, now: float) -> list[Action]:
        """Give up those that are silent for too long."""
        actions: list[Action] = []
        for node in list(self.nodes.values()):
            if not node.dead and node.silent(now, self._settings.dead_after_s):
                node.retired.clear()
                actions += self._node_lost(node)
            elif node.dead and node.silent(now, FORGET_DEAD_S):
                del self.nodes[node.id]
                self._touch_node(node)
        for worker in list(self.workers()):
            if not worker.dead and worker.silent(now, self._settings.dead_after_s):
                worker.dead = True
                worker.fence += 1
                worker.retired.clear()  # whoever speaks next under this name may have it
                actions += self._worker_lost(worker, now)
                self.touch(worker)
            elif worker.dead and worker.silent(now, FORGET_DEAD_S):
                self._forget(worker)
        return actions

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _joined(self, report: WorkerReport, known: Worker | None, now: float, actions: list[Action]) -> Worker:
        """A new worker, or a new process in the place of ``known``."""
        worker: PrefillWorker | DecodeWorker
        identity = report.worker_id, report.incarnation, now
        match report.load:
            case PrefillLoad():
                settings = self._settings
                loads = LoadSpeeds(settings.dram_bytes_per_s, settings.ssd_bytes_per_s, settings.link_bytes_per_s)
                worker = PrefillWorker(*identity, queue=PrefillQueue(settings.prefill_tokens_per_s), loads=loads)
            case DecodeLoad():
                worker = DecodeWorker(*identity)
        worker.actor, worker.fence = report.actor, report.fence
        if known is not None:
            if not known.dead:
                actions += self._worker_lost(known, now)
            _succeed(known, worker)
            worker.ramp.begin(now)
            # The same machine and model.
            if isinstance(known, PrefillWorker) and isinstance(worker, PrefillWorker):
                worker.queue.speed, worker.loads = known.queue.speed, known.loads
            if isinstance(known, DecodeWorker) and isinstance(worker, DecodeWorker):
                worker.step_time = known.step_time
            self._forget(known)
        else:
            self._recollection.worker_joined(worker)
        if isinstance(worker, PrefillWorker):
            self.prefill[worker.id] = worker
        else:
            self.decode[worker.id] = worker
        actions.append(Notice("up", worker.id, worker.incarnation))
        return worker

    def _reply(self, worker: Worker, now: float) -> Reply:
        """Tells the worker its fence and node, and notes which node it must know of by its next word."""
        worker.attached_node = worker.told_node
        node = self.nodes.get(worker.node_id)
        if node is None or node.dead:
            worker.told_node = None
            return Reply(worker.fence)
        if worker.served_by not in (None, node.incarnation):
            worker.ramp.begin(now)  # its node restarted, and has nothing cached
        worker.told_node = worker.served_by = node.incarnation
        return Reply(worker.fence, node.local, node.incarnation)

    def _worker_lost(self, worker: Worker, now: float) -> list[Action]:
        self._counters["workers_lost"] += 1
        self._counters["requests_dropped"] += self.assignments.drop(worker, now)
        return [Notice("down", worker.id, worker.incarnation)]

    def _node_lost(self, node: Node) -> list[Action]:
        if node.dead:
            return []
        node.dead = True
        self._counters["nodes_lost"] += 1
        slot = self._index.slot_of(node.id)
        if slot >= 0:
            self._node_heard_at[slot : slot + 1] = -np.inf
            for belief in (self.links, self.senders, self._promises):
                belief.forget(slot)
        self._index.node_gone(node.id)
        self._touch_node(node)
        return [Unfollow(node.events)]

    def _forget(self, worker: Worker) -> None:
        self.prefill.pop(worker.id, None)
        self.decode.pop(worker.id, None)
        self._prefill_columns.remove(worker.id)
        self._decode_columns.remove(worker.id)
        self._leave(worker)

    def _move(self, worker: Worker, node_id: str) -> None:
        if worker.node_id != node_id:
            self._leave(worker)
        worker.node_id = node_id
        self._at_node.setdefault(node_id, {})[worker.id] = worker

    def _leave(self, worker: Worker) -> None:
        there = self._at_node.get(worker.node_id)
        if there is not None and there.get(worker.id) is worker:
            del there[worker.id]
            if not there:
                del self._at_node[worker.node_id]

    def _touch_node(self, node: Node) -> None:
        """Something about ``node`` has changed, and so whether its workers may get work."""
        slot = self._index.slot_of(node.id)
        if slot >= 0:
            while slot >= len(self._node_heard_at):
                self._node_heard_at = np.concatenate([self._node_heard_at, np.full_like(self._node_heard_at, -np.inf)])
            self._node_heard_at[slot] = -np.inf if node.dead or node.draining else node.heard_at
        for worker in self._at_node.get(node.id, {}).values():
            self.touch(worker)

    def _make_room(self) -> bool:
        """Room for one more member, at the cost of the one that has been dead the longest."""
        if len(self.nodes) + len(self.prefill) + len(self.decode) < MEMBERS_MAX:
            return True
        dead: list[Member] = [m for m in (*self.nodes.values(), *self.workers()) if m.dead]
        if not dead:
            return False
        oldest = min(dead, key=lambda member: member.heard_at)
        if isinstance(oldest, Worker):
            self._forget(oldest)
        else:
            self._touch_node(self.nodes.pop(oldest.id))
        return True

    def view(self, now: float) -> dict[str, Any]:
        """Plain data; seconds since each member was heard."""
        return {
            "nodes": [
                {
                    "id": n.id,
                    "incarnation": n.incarnation,
                    "endpoint": n.endpoint,
                    "live": n.usable(now, self._settings.suspect_after_s),
                    "draining": n.draining,
                    "silent_s": now - n.heard_at,
                    "slots_total": n.slots_total,
                    "slots_free": n.slots_free,
                    "blocks_known": self._index.blocks(n.id),
                }
                for n in self.nodes.values()
            ],
            "workers": [self._view_worker(w, now) for w in self.workers()],
        }

    def _view_worker(self, worker: Worker, now: float) -> dict[str, Any]:
        view: dict[str, Any] = {
            "id": worker.id,
            "role": "prefill" if isinstance(worker, PrefillWorker) else "decode",
            "incarnation": worker.incarnation,
            "node_id": worker.node_id,
            "standing": self.standing(worker, now).value,
            "fence": worker.fence,
            "silent_s": now - worker.heard_at,
            "in_flight": worker.in_flight,
        }
        match worker:
            case PrefillWorker(queue=queue):
                view |= {"queue_s": queue.seconds(now), "tokens_per_s": 1.0 / queue.speed.per_token}
            case DecodeWorker(room=room):
                view |= {"room_blocks": room.blocks, "total_blocks": room.total_blocks}
            case _:
                pass
        return view


def _fits(worker: Worker, report: WorkerReport) -> bool:
    """Whether the report is of the worker's own role."""
    return isinstance(worker, PrefillWorker) == isinstance(report.load, PrefillLoad)


def _succeed(old: Member, new: Member) -> None:
    """``new`` takes the place of ``old``, whose process is not listened to any more."""
    new.retired = old.retired
    new.retired.append(old.incarnation)
