"""Who is in the cluster, and who may get work. Pure.

========  ==========================================================================  ==================
standing  meaning                                                                     gets work
========  ==========================================================================  ==================
live      heard lately, under the current fence, at a live pool node                  yes
joining   not yet known to be connected to its pool node (new, or the node restarted)  no
suspect   silent for ``suspect_after_s``, or its pool node is                         no
blamed    quarantined after a gateway reported it                                     no, for a while
fenced    spoke again after it was given up, without the new fence so far             no
dead      silent for ``dead_after_s``: its requests run elsewhere                     no
========  ==========================================================================  ==================

A worker that came back (after being dead, as a new process, or at a restarted node) is ramped up: it may have one request, and
two more for each that it finished, until ``RAMP_S`` are over. The ramp is a preference: where only such workers are left, they
get all there is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from engine.serving.step_time import StepTime
from scheduler.decode_room import DecodeRoom
from scheduler.prefill_queue import PrefillQueue
from scheduler.routing.load_speed import LoadSpeeds

RETIRED_MAX: Final = 8
QUARANTINE_FIRST_S: Final = 1.0
QUARANTINE_MAX_S: Final = 30.0
RAMP_S: Final = 10.0
RAMP_FIRST: Final = 1
RAMP_GROWTH: Final = 2
STEP_GUESS_S: Final = 0.03
"""A decode step before the first was reported."""
STUCK_S: Final = 10.0
"""A worker that has work and does none of it for so long is slow enough to be avoided."""
PIECE_MAX_S: Final = 60.0
"""More than any piece takes: what a worker says of its pieces does not put off for ever that it is found stuck."""


class Standing(StrEnum):
    LIVE = "live"
    JOINING = "joining"
    SUSPECT = "suspect"
    BLAMED = "blamed"
    FENCED = "fenced"
    DEAD = "dead"


@dataclass(slots=True)
class Member:
    """A process that sends heartbeats. ``retired`` are incarnations that a newer one replaced: a process that was thought gone
    and speaks again must not take its successor's place."""

    id: str
    incarnation: str
    heard_at: float
    dead: bool = False
    retired: deque[str] = field(default_factory=lambda: deque[str](maxlen=RETIRED_MAX))

    def silent(self, now: float, limit_s: float) -> bool:
        return now - self.heard_at > limit_s


@dataclass(slots=True)
class Node(Member):
    endpoint: str = ""
    events: str = ""
    local: str = ""
    draining: bool = False
    slots_total: int = 0
    slots_free: int = 0
    slot_bytes: int = 0

    def usable(self, now: float, suspect_after_s: float) -> bool:
        """Whether it can be counted on."""
        return not self.dead and not self.draining and not self.silent(now, suspect_after_s)


@dataclass(slots=True)
class Quarantine:
    """Doubles with each report against a worker, up to ``QUARANTINE_MAX_S``; a request that it finishes clears the record."""

    until: float = float("-inf")
    failures: int = 0

    def blame(self, now: float) -> None:
        if now < self.until:
            return  # several requests that failed together are one failure
        self.until = now + min(QUARANTINE_MAX_S, QUARANTINE_FIRST_S * 2 ** min(self.failures, 16))
        self.failures += 1


@dataclass(slots=True)
class Ramp:
    """How many requests a worker that came back may have at once."""

    until: float = float("-inf")
    finished: int = 0

    def begin(self, now: float) -> None:
        self.until, self.finished = now + RAMP_S, 0

    def allows(self, in_flight: int, now: float) -> bool:
        return now >= self.until or in_flight < RAMP_FIRST + RAMP_GROWTH * self.finished


@dataclass(slots=True)
class Progress:
    """Whether a worker with work gets on with it: ``left`` of the last report, and when it last was another, or nothing."""

    left: int = 0
    since: float = float("-inf")

    def stuck(self, left: int, finished: int, now: float, piece_s: float = 0.0) -> bool:
        """Take over a report; says whether nothing has moved for ``STUCK_S`` and twice ``piece_s`` (its usual piece). Says so
        once, then counts from the start."""
        if not left or finished or left != self.left:
            self.left, self.since = left, now
            return False
        if now - self.since < STUCK_S + 2 * min(piece_s, PIECE_MAX_S):
            return False
        self.since = now
        return True


@dataclass(slots=True)
class Worker(Member):
    """``fence`` is what we say, ``adopted_fence`` what the worker said last. ``told_node`` is the node incarnation of our last
    reply, ``attached_node`` that of the reply before the last report: the worker has it, and had time to connect. ``served_by``
    is the last that it was ever told."""

    actor: str = ""
    node_id: str = ""
    fence: int = 0
    adopted_fence: int = 0
    told_node: str | None = None
    attached_node: str | None = None
    served_by: str | None = None
    quarantine: Quarantine = field(default_factory=Quarantine)
    ramp: Ramp = field(default_factory=Ramp)

    @property
    def in_flight(self) -> int:
        raise NotImplementedError

    def standing(self, node: Node | None, now: float, suspect_after_s: float) -> Standing:
        """``node`` is the worker's pool node, None where it is not known."""
        if self.dead:
            return Standing.FENCED if not self.silent(now, suspect_after_s) else Standing.DEAD
        if self.silent(now, suspect_after_s):
            return Standing.SUSPECT
        if node is None or node.dead or self.attached_node != node.incarnation:
            return Standing.JOINING
        if node.silent(now, suspect_after_s):
            return Standing.SUSPECT
        return Standing.BLAMED if now < self.quarantine.until else Standing.LIVE


@dataclass(slots=True)
class PrefillWorker(Worker):
    queue: PrefillQueue = field(default_factory=lambda: PrefillQueue(1.0))
    loads: LoadSpeeds = field(default_factory=LoadSpeeds)
    progress: Progress = field(default_factory=Progress)

    @property
    def in_flight(self) -> int:
        return len(self.queue.open)


@dataclass(slots=True)
class DecodeWorker(Worker):
    room: DecodeRoom = field(default_factory=DecodeRoom)
    step_time: StepTime = field(default_factory=lambda: StepTime(STEP_GUESS_S))

    @property
    def in_flight(self) -> int:
        return len(self.room.open)
