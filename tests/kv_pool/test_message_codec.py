"""The wire: what is written is read back, and nothing else is let in."""

from __future__ import annotations

import contextlib
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool.node.messages import (
    Acquire,
    Alive,
    AskEvents,
    Commit,
    Ended,
    ErrorCode,
    Grant,
    Granted,
    Hello,
    Miss,
    Peer,
    Pull,
    Refusal,
    Release,
    Reserve,
    SlotsReserved,
    Tier,
    Welcome,
    grant_row,
)
from kv_pool.transport.codec import (
    ANSWERS,
    GRANTS_MAX,
    HEADER_BYTES_MAX,
    KEYS_MAX,
    META_BYTES_MAX,
    QUESTIONS,
    REQUESTS,
    SOURCES_MAX,
    TABLE,
    MalformedMessageError,
    decode,
    encode,
)
from tests.kv_pool.node_scene import key, keys

EVERYTHING = REQUESTS | QUESTIONS | ANSWERS
ROWS = [
    grant_row(key(1), None, 3, 2**64 - 1, 16, 4096, 2**64 - 1, private=True),
    grant_row(key(2), key(1), 4, 1, 16, 0, 0, private=False),
]
GRANTED = Granted(1, 0, 7, b"".join(ROWS), bytes((Tier.DRAM, Tier.REMOTE_SSD)), (b"", b"meta"))
MESSAGES = [
    Hello(),
    Reserve(1, keys(1, 2), key(0), 2.5, True, "chat"),
    Commit(1, key(1), None, 16, 4096, 2**64 - 1, b"x"),
    Acquire(1, keys(1), True, 0.0, (Peer("node-b", "tcp://127.0.0.1:20001"), Peer("node-c", "tcp://127.0.0.1:20002"))),
    Acquire(1, keys(1), False, 1.0, ()),
    Release((1, 2**63 - 1), False),
    Pull(1, keys(1), True, 1.0, 8),
    AskEvents(3),
    Welcome("node-a", 3, 4, 5.0),
    Alive(),
    SlotsReserved(1, (None, 3)),
    GRANTED,
    Granted(1, 5, 0, ROWS[0], bytes(1), (), True),
    Ended(1, 0, Miss.LATE),
    Ended(1, 1, None),
    Refusal(ErrorCode.REPLAYED),
]
HONEST = {"op": "acquire", "inc": "i", "ticket": 1, "keys": [key(1)], "wait": True, "timeout_s": 1.0, "sources": []}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_what_is_written_is_read_back(message: object):
    assert decode(encode(message, "incarnation"), EVERYTHING) == (message, "incarnation")  # type: ignore[arg-type]


def test_the_table_knows_every_field_in_its_order():
    for kind, table in TABLE.values():
        if kind is not Hello:  # of which nothing travels
            assert [field.name for field in fields(kind)] == list(table)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"op": "launch"}, "op"),
        ({"op": 5}, "op"),
        ({"op": "granted"}, "op"),
        ({"inc": None}, "inc"),
        ({"ticket": -1}, "ticket"),
        ({"ticket": True}, "ticket"),
        ({"ticket": 2**63}, "ticket"),
        ({"ticket": 1.0}, "ticket"),
        ({"keys": []}, "keys"),
        ({"keys": [b"short"]}, "keys"),
        ({"keys": [key(1), key(1)]}, "keys"),
        ({"keys": [key(i) for i in range(KEYS_MAX + 1)]}, "keys"),
        ({"keys": {"a": 1}}, "keys"),
        ({"wait": 1}, "wait"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"sources": ["node-b"]}, "sources"),
        ({"sources": None}, "sources"),
        ({"sources": [["node-b", "ipc:///tmp/x"]]}, "sources"),
        ({"sources": [["node-b", "tcp://127.0.0.1:1/etc"]]}, "sources"),
        ({"sources": [["n" * 300, "tcp://127.0.0.1:20000"]]}, "sources"),
        ({"sources": [["n", "tcp://127.0.0.1:20000"]] * (SOURCES_MAX + 1)}, "sources"),
        ({"surprise": 1}, "fields"),
    ],
)
def test_one_wrong_field_is_named_and_its_content_is_not(change: dict[str, object], names: str):
    with pytest.raises(MalformedMessageError, match=names) as raised:
        decode(msgpack.packb(HONEST | change), REQUESTS)
    assert "short" not in str(raised.value)
    assert "surprise" not in str(raised.value)


def test_a_grants_rows_say_what_the_block_is():
    first, second = GRANTED.grants()
    assert first == Grant(key(1), None, 7, 3, 2**64 - 1, 16, 4096, 2**64 - 1, b"", True, Tier.DRAM)
    assert second == Grant(key(2), key(1), 8, 4, 1, 16, 0, 0, b"meta", False, Tier.REMOTE_SSD)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": GRANTED.rows[:-1]},
        {"rows": GRANTED.rows + b"x"},
        {"rows": "text"},
        {"tiers": b""},
        {"tiers": bytes(3)},
        {"tiers": bytes((0, len(Tier)))},
        {"metas": [b""]},
        {"metas": [b"", b"x" * (META_BYTES_MAX + 1)]},
        {"metas": [b"", "text"]},
        {"lease": -1},
        {"ended": 1},
        {"rows": ROWS[0] * (GRANTS_MAX + 1), "tiers": bytes(GRANTS_MAX + 1), "metas": []},
    ],
)
def test_grants_that_do_not_fit_each_other_are_refused(change: dict[str, object]):
    honest = msgpack.unpackb(encode(GRANTED, "i"))
    assert decode(msgpack.packb(honest), ANSWERS)[0] == GRANTED
    with pytest.raises(MalformedMessageError, match="granted"):
        decode(msgpack.packb(honest | change), ANSWERS)


def test_a_missing_field_is_refused():
    for name in HONEST:
        with pytest.raises(MalformedMessageError):
            decode(msgpack.packb({k: v for k, v in HONEST.items() if k != name}), REQUESTS)


def test_an_oversized_message_is_not_even_looked_at():
    with pytest.raises(MalformedMessageError, match="limit"):
        decode(b"\xc1" * (HEADER_BYTES_MAX + 1), REQUESTS)


@given(st.binary(max_size=200))
def test_random_bytes_are_malformed_and_nothing_else(noise: bytes):
    with pytest.raises(MalformedMessageError):
        decode(noise, EVERYTHING)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_a_byte_changed_is_read_or_malformed_and_nothing_else(message: object, data: st.DataObject):
    frame = bytearray(encode(message, "i"))  # type: ignore[arg-type]
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessageError):
        decode(bytes(frame), EVERYTHING)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.binary(max_size=20)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    st.sampled_from(sorted(HONEST)),
)
def test_any_value_in_any_field_is_read_or_malformed_and_nothing_else(value: object, name: str):
    with contextlib.suppress(MalformedMessageError):
        decode(msgpack.packb(HONEST | {name: value}), REQUESTS)
