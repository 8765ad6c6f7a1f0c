"""The client's pure parts: event reader, retry policy, metrics, the drawn tree of errors."""

from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.client import errors, sse
from cluster.client.exposition import parse_metrics
from cluster.client.retry import RetryPolicy
from cluster.client.sse import EventReader
from cluster.client.timing import StreamTiming
from cluster.client.transport import trusts_environment

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)


@given(
    events=st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=5), end=st.sampled_from(["\n", "\r\n", "\r"]), data=st.data()
)
def test_events_survive_any_cut(events: list[list[str]], end: str, data: st.DataObject) -> None:
    stream = "".join(
        "".join(f"data: {line}{end}" for line in lines) + f": comment{end}id: 7{end}{end}" for lines in events
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = EventReader()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in reader.push(piece)] == ["\n".join(lines) for lines in events]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    for piece in (b"data: " + b"x" * 200, b"data: xxxxxxxxxx\n" * 20):
        with pytest.raises(errors.ProtocolError, match="longer than 100"):
            EventReader().push(piece)


def test_waits_grow_and_are_capped() -> None:
    policy, lost = RetryPolicy(attempts=9), errors.UnreachableError()
    assert [policy.wait_s(lost, failed, 100) for failed in range(1, 10)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, None]


@pytest.mark.parametrize(("asked", "waited"), [(None, 0.1), (0.0, 0.0), (3.0, 3.0), (500.0, 20.0)])
def test_retry_after_is_honoured_up_to_a_cap(asked: float | None, waited: float) -> None:
    assert RetryPolicy().wait_s(errors.OverloadedError("busy", retry_after_s=asked), 1, 100) == waited


def test_no_wait_beyond_the_request_itself() -> None:
    assert RetryPolicy().wait_s(errors.OverloadedError("busy", retry_after_s=5), 1, left_s=4) is None


@pytest.mark.parametrize("text", ["soon", "inf", "nan", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_retry_after_that_is_no_number_of_seconds(text: str) -> None:
    assert errors.error_of_response(429, {"retry-after": text}, b"").retry_after_s is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"error": "text"}', b'{"error": {"message": 5}}', b"\xff", b"[" * 100_000])
def test_any_error_body_gives_an_error(body: bytes) -> None:
    error = errors.error_of_response(500, {}, body)
    assert isinstance(error, errors.ServerError)
    assert error.message == "The server answered 500."


def test_messages_are_cut() -> None:
    body = b'{"error": {"message": "' + b"x" * 5000 + b'"}}'
    assert len(errors.error_of_response(400, {}, body).message) == errors.MESSAGE_CHARS_MAX


def test_metrics_in_another_form() -> None:
    with pytest.raises(errors.ProtocolError):
        parse_metrics("<html> {")


def test_labels_are_sorted() -> None:
    assert parse_metrics('a{z="1",b="2"} 3\n') == {'a{b="2",z="1"}': 3.0}


def test_timing() -> None:
    timing = StreamTiming(10.0)
    assert timing.ttft_s is None
    assert timing.tbt_s(5) is None
    for now in (12.0, 13.0, 16.0):
        timing.mark(now)
    assert (timing.ttft_s, timing.tbt_s(5), timing.tbt_s(1), timing.pieces) == (2.0, 1.0, None, 3)


@pytest.mark.parametrize(
    ("url", "trusts"),
    [
        ("http://127.0.0.1:1", False),
        ("http://localhost", False),
        ("http://[::1]:2", False),
        ("http://10.0.0.1", True),
        ("https://llm.example", True),
    ],
)
def test_proxies_never_see_loopback(url: str, trusts: bool) -> None:
    assert trusts_environment(url) is trusts


def test_the_drawn_tree_is_the_tree() -> None:
    drawing = [re.search(r"[├└]── (\w+)", line) for line in (errors.__doc__ or "").splitlines()]
    parents = {0: "MoonpoolError"}  # by column of the branch below them
    drawn: dict[str, str] = {}
    for match in filter(None, drawing):
        name, column = match.group(1), match.start()
        drawn[name] = parents[column - 4]
        parents[column] = name
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.MoonpoolError)]
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in kinds if kind is not errors.MoonpoolError}
