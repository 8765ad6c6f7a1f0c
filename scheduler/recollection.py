"""What an earlier scheduler has learnt, given to those who join; and what this one has learnt, to be kept. Pure.

A recalled speed takes the place of a configured first guess, no more: it goes to a worker of that name that has reported nothing
yet, and to the links of a node of that name when it first appears. What was recalled and never used is kept on, so that a worker
that is idle for one scheduler's life, or joins late, loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from scheduler.index import BlockIndex
from scheduler.members import DecodeWorker, PrefillWorker, Worker
from scheduler.routing.links import LinkSpeeds
from scheduler.speeds import LINKS_MAX, MEMBERS_MAX, Link, LoadTimes, PrefillLine, Speeds, StepTimes

_Value = TypeVar("_Value")


class Recollection:
    """``links`` and ``index`` are the fleet's."""

    def __init__(self, links: LinkSpeeds, index: BlockIndex) -> None:
        self._links = links
        self._index = index
        self._recalled = Speeds()
        self._links_of: dict[str, list[Link]] = {}

    def recall(self, speeds: Speeds, workers: Iterable[Worker], nodes: Iterable[str]) -> None:
        """From now on these are the first guesses; ``workers`` and ``nodes`` are there already."""
        self._recalled = speeds
        self._links_of = {}
        for link in speeds.links:
            for node_id in {link[0], link[1]}:
                self._links_of.setdefault(node_id, []).append(link)
        for worker in workers:
            self.worker_joined(worker)
        for node_id in nodes:
            self.node_joined(node_id)

    def worker_joined(self, worker: Worker) -> None:
        """A worker is new, and nobody of its name was here before it."""
        recalled = self._recalled
        match worker:
            case PrefillWorker():
                if worker.id in recalled.prefill:
                    worker.queue.speed.recall(*recalled.prefill[worker.id])
                if worker.id in recalled.loads:
                    worker.loads.recall(recalled.loads[worker.id])
            case DecodeWorker() if worker.id in recalled.steps:
                worker.step_time.recall(*recalled.steps[worker.id])
            case _:
                pass

    def node_joined(self, node_id: str) -> None:
        """A node is new to the index."""
        slot = self._index.slot_of(node_id)
        if slot < 0:
            return
        if node_id in self._recalled.senders:
            self._links.recall_out(slot, self._recalled.senders[node_id])
        for source_id, target_id, speed in self._links_of.get(node_id, ()):
            source, target = self._index.slot_of(source_id), self._index.slot_of(target_id)
            if source >= 0 and target >= 0:
                self._links.recall(source, target, speed)

    def learnt(
        self, prefill: Mapping[str, PrefillWorker], decode: Mapping[str, DecodeWorker], nodes: Iterable[str]
    ) -> Speeds:  # fmt: skip
        """All that is worth keeping. Changes nothing: what is decided must not depend on who looks."""
        lines: dict[str, PrefillLine] = {}
        loads: dict[str, LoadTimes] = {}
        steps: dict[str, StepTimes] = {}
        for worker in prefill.values():
            speed = worker.queue.speed
            if speed.observed:
                lines[worker.id] = speed.per_token, speed.per_token_position
            if worker.loads.observed:
                loads[worker.id] = worker.loads.per_byte
        for worker in decode.values():
            if worker.step_time.observed:
                steps[worker.id] = worker.step_time.believed
        at = {self._index.slot_of(node_id): node_id for node_id in nodes}
        senders = {at[slot]: speed for slot, speed in self._links.learnt_out() if slot in at}
        links = {
            (at[source], at[target]): speed
            for source, target, speed in self._links.learnt(LINKS_MAX)
            if source in at and target in at
        }
        for source_id, target_id, speed in self._recalled.links:
            if len(links) >= LINKS_MAX:
                break
            links.setdefault((source_id, target_id), speed)
        recalled = self._recalled
        return Speeds(
            _with(lines, recalled.prefill), _with(loads, recalled.loads), _with(steps, recalled.steps),
            _with(senders, recalled.senders), tuple((*ends, speed) for ends, speed in links.items()),
        )  # fmt: skip


def _with(learnt: dict[str, _Value], recalled: Mapping[str, _Value]) -> dict[str, _Value]:
    """What was learnt now, then what is only remembered, as far as there is room."""
    for name, value in recalled.items():
        if len(learnt) >= MEMBERS_MAX:
            break
        learnt.setdefault(name, value)
    return learnt
