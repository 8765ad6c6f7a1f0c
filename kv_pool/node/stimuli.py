"""All that can happen to a node, and all that its state can want done about it."""

from __future__ import annotations

from dataclasses import dataclass

from kv_pool.events.types import BlockEvent
from kv_pool.keys import BlockKey
from kv_pool.node.messages import Answer, Commit, Granted, Miss, Peer, Request, Tier
from kv_pool.ssd.records import BatchWritten, DiskDown, DiskUp, ReadRecord, RecordRead, WriteBatch

# --- events --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request of a client."""

    client: str
    request: Request


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client's connection is gone or takes nothing more. Its process may still be writing."""

    client: str


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A client's process is dead: nothing writes to its slots any more."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """A block of a fetch begins to come in, and needs a slot (``commit.slot`` means nothing). ``tier`` is where its node had
    it."""

    fetch: int
    commit: Commit
    private: bool
    tier: Tier = Tier.DRAM
    retention: int = 0


@dataclass(frozen=True, slots=True)
class BlockLanded:
    """The bytes of an arrived block are in ``slot``; ``sound`` says that their checksum is right there. ``lost``: it was
    given up before all of them had come."""

    slot: int
    sound: bool
    lost: bool = False


@dataclass(frozen=True, slots=True)
class FetchStalled:
    """The peer has sent what it has of the fetch, and waits for the next key to be committed."""

    fetch: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """No more blocks of this fetch will arrive; None where all have."""

    fetch: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator wants the node empty (``enable``), or in use again: no new blocks are taken, those that are here move to the
    SSD or go."""

    enable: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. ``wall_offset``: how far the wall clock is ahead of ``now``, None where it is as before."""

    wall_offset: float | None = None


Event = (
    Asked | ClientGone | ProcessGone | BlockArrived | BlockLanded | FetchStalled | FetchEnded | Drain | Tick
    | DiskUp | DiskDown | BatchWritten | RecordRead
)  # fmt: skip


# --- actions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greet:
    """Tell a new client what this node is."""

    client: str


@dataclass(frozen=True, slots=True)
class Send:
    client: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class SendBlock:
    """A grant with the first ``length`` bytes of ``slot`` behind it. The slot is leased until the client releases it."""

    client: str
    answer: Granted
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Publish:
    """A KV event for the scheduler's index."""

    event: BlockEvent


@dataclass(frozen=True, slots=True)
class SetEpoch:
    """The slot has another owner from now on. Must be visible before any later action on the slot."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Ask ``peer`` for ``keys``; answered by BlockArrived for each that comes, then FetchEnded, within ``timeout_s`` or not at
    all."""

    fetch: int
    peer: Peer
    keys: tuple[BlockKey, ...]
    wait: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Nobody waits for it any more. No answer is needed."""

    fetch: int
    peer: Peer


@dataclass(frozen=True, slots=True)
class Land:
    """Put the bytes of the block that has just arrived into ``slot``; answered by one BlockLanded, perhaps much later."""

    slot: int


@dataclass(frozen=True, slots=True)
class SaveBudget:
    """Keep this for the next start: what was written to the SSD lately."""

    packed: bytes


Action = Greet | Send | SendBlock | Publish | SetEpoch | StartFetch | CancelFetch | Land | WriteBatch | ReadRecord | SaveBudget
