"""What a node's state decides, done: what becomes of the others when one of them fails."""

from __future__ import annotations

from typing import Any

import pytest

from kv_pool.effects import Effects
from kv_pool.events.types import DRAM, BlockRemoved
from kv_pool.node.messages import Alive, Granted, Tier, Welcome, grant_row
from kv_pool.node.stimuli import (
    Action,
    CancelFetch,
    Greet,
    Land,
    Publish,
    SaveBudget,
    Send,
    SendBlock,
    SetEpoch,
    StartFetch,
)
from kv_pool.ssd.records import Place, ReadRecord, WriteBatch
from tests.kv_pool.node_scene import PEER, key, keys

LENGTH = 64
ROW = grant_row(key(1), None, 0, 1, 16, LENGTH, 7, private=False)
ACTIONS: list[tuple[str, Action]] = [
    ("local.send", Greet("local-1")),
    ("remote.send", Send("aa", Alive())),
    ("arena.set_epoch", SetEpoch(2, 7)),
    ("remote.send", SendBlock("bb", Granted(1, 0, 1, ROW, bytes([Tier.DRAM])), 0, LENGTH)),
    ("events.add", Publish(BlockRemoved(keys(1), DRAM))),
    ("peers.start", StartFetch(5, PEER, keys(2), False, 1.0)),
    ("peers.cancel", CancelFetch(4, PEER)),
    ("disk.write", WriteBatch(1, 0, 1, True, 0, (), None)),
    ("disk.read", ReadRecord(2, Place(0, 1, 1, LENGTH), key(3), 1)),
    ("disk.save_budget", SaveBudget(b"spent")),
]
"""One of each kind that asks something of a part of the node, with what it asks."""


class Part:
    """A part of the node that only notes what it is asked for, and breaks or refuses where a test says so."""

    fd = 3

    def __init__(self, name: str, asked: list[str], broken: str, refuses: str) -> None:
        self._name = name
        self._asked = asked
        self._broken = broken
        self._refuses = refuses

    def slot_read_only(self, index: int) -> memoryview:
        return memoryview(bytes(LENGTH))

    def __getattr__(self, method: str) -> Any:
        asked_for = f"{self._name}.{method}"

        def ask(*_: object, **__: object) -> bool:
            if asked_for == self._broken:
                raise OSError(f"{asked_for} is broken")
            self._asked.append(asked_for)
            return asked_for != self._refuses

        return ask


def effects(asked: list[str], *, broken: str = "", refuses: str = "") -> Effects:
    parts: dict[str, Any] = {
        name: Part(name, asked, broken, refuses) for name in ("arena", "local", "remote", "events", "peers", "disk")
    }
    return Effects(Welcome("node-a", 4, LENGTH, 5.0), "i", **parts)


@pytest.mark.parametrize("broken", sorted({part for part, _ in ACTIONS}))
def test_an_action_that_fails_loses_none_of_the_others(broken: str, caplog: pytest.LogCaptureFixture):
    asked: list[str] = []
    doer = effects(asked, broken=broken)
    doer.do([*(action for _, action in ACTIONS), Land(3)], now=0.0)
    failed = [action for part, action in ACTIONS if part == broken]
    assert asked == [part for part, _ in ACTIONS if part != broken]
    assert doer.landing == 3
    assert doer.failed == len(failed)
    assert [record.getMessage() for record in caplog.records] == [
        f"pool node node-a: {type(action).__name__} failed" for action in failed
    ]


def test_nothing_fails_where_nothing_is_broken():
    asked: list[str] = []
    doer = effects(asked)
    doer.do([action for _, action in ACTIONS], now=0.0)
    assert asked == [part for part, _ in ACTIONS]
    assert (doer.failed, doer.bytes_out, doer.take_gone()) == (0, LENGTH, [])


def test_a_client_that_takes_nothing_more_is_named_once_and_the_others_get_theirs():
    asked: list[str] = []
    doer = effects(asked, refuses="local.send")
    doer.do([action for _, action in ACTIONS], now=0.0)
    assert asked == [part for part, _ in ACTIONS]
    assert doer.pending
    assert doer.take_gone() == ["local-1"]
    assert not doer.pending
    assert (doer.failed, doer.take_gone()) == (0, [])
