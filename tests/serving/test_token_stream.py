"""Token frames: what is written is read back, anything else is a typed error."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving.token_stream import (
    EVENTS_PER_FRAME_MAX,
    FRAME_BYTES_MAX,
    DecodeStarted,
    Failed,
    FailureCause,
    Finished,
    FinishReason,
    MalformedFrameError,
    PrefillDone,
    TokenLogprob,
    Tokens,
    decode,
    encode,
)

ids = st.text(min_size=1, max_size=20)
attempts = st.integers(0, 5)
floats = st.floats(allow_nan=False, allow_infinity=False)
token = st.integers(0, 2**31)
logprobs = st.builds(TokenLogprob, floats, st.lists(st.tuples(token, floats), max_size=3).map(tuple))
events = st.one_of(
    st.builds(Tokens, ids, attempts, st.integers(0, 10**6), st.lists(token, max_size=4).map(tuple), st.none()),
    st.builds(Tokens, ids, attempts, st.integers(0, 10**6), st.tuples(token), st.tuples(logprobs)),
    st.builds(Finished, ids, attempts, st.sampled_from(FinishReason)),
    st.builds(Failed, ids, attempts, st.sampled_from(FailureCause), st.text(max_size=30)),
    st.builds(PrefillDone, ids, attempts, token, token, token, token, token, floats, floats, floats),
    st.builds(DecodeStarted, ids, attempts, floats),
)


@settings(deadline=None)
@given(sender=ids, batch=st.lists(events, max_size=8))
def test_round_trip(sender: str, batch: list[object]):
    assert decode(encode(sender, batch)) == (sender, batch)


@settings(deadline=None)
@given(noise=st.binary(max_size=200))
def test_noise_is_a_typed_error(noise: bytes):
    try:
        decode(noise)
    except MalformedFrameError:
        return
    sender, batch = decode(noise)  # whatever passes is a frame that this module could have written
    assert decode(encode(sender, batch)) == (sender, batch)


@pytest.mark.parametrize(
    "payload",
    [
        ["s", [["z", "r", 0]]],
        ["s", [["t", "r", 0, 1, [1], [[0.0]]]]],
        ["s", [["t", "r", "x", 1, [1], None]]],
        [1, []],
        ["s", [["f", "r", 0, "because"]]],
        {"sender": "s"},
        ["s", [[]] * (EVENTS_PER_FRAME_MAX + 1)],
    ],
)
def test_what_this_module_does_not_write_is_refused(payload: object):
    with pytest.raises(MalformedFrameError):
        decode(msgpack.packb(payload))


def test_an_oversized_frame_is_refused_before_it_is_read():
    with pytest.raises(MalformedFrameError, match="over the limit"):
        decode(bytes(FRAME_BYTES_MAX + 1))
