"""Tokens to text: what is held back, and that text and log-probabilities never disagree."""

from __future__ import annotations

from gateway_fakes import ByteDetokenizer, PlainStops
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.answer import AnswerText
from engine.serving.token_stream import TokenLogprob


def test_tokens_held_for_a_stop_string_keep_their_logprobs_back():
    answer = AnswerText(ByteDetokenizer(), PlainStops(["ab"]))
    for token in b"aab":
        answer.push(token, TokenLogprob(-1.0))
    answer.end()
    part = answer.take()
    assert answer.stopped
    assert part is not None
    assert part.text == "a"
    assert [(r.token_id, r.offset) for r in part.reports] == [(ord("a"), 0)]


def test_what_was_held_back_goes_out_at_the_end():
    answer = AnswerText(ByteDetokenizer(), PlainStops(["abc"]))
    for token in b"xab":
        answer.push(token, None)
    assert (answer.take() or answer).text == "x"
    answer.end()
    assert (answer.take() or answer).text == "ab"
    assert answer.take() is None


@given(
    text=st.text(st.sampled_from("abé😀"), max_size=12),
    stops=st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=3), max_size=2),
    reads=st.sets(st.integers(0, 40)),
)
def test_parts_add_up_however_often_they_are_read(text: str, stops: list[str], reads: set[int]):
    answer, seen, tokens = AnswerText(ByteDetokenizer(), PlainStops(stops)), "", []
    for i, token in enumerate(text.encode()):
        answer.push(token, TokenLogprob(-1.0))
        if i in reads and (part := answer.take()):
            seen, tokens = seen + part.text, tokens + list(part.reports)
        if answer.stopped:
            break
    answer.end()
    if part := answer.take():
        seen, tokens = seen + part.text, tokens + list(part.reports)
    found = [text.index(stop) for stop in stops if stop in text]
    # The stop string that is complete first ends the answer, not the one that begins first.
    ends = min((text.index(s) + len(s) for s in stops if s in text), default=None)
    cut = text if ends is None else text[: min(text.index(s) for s in stops if s in text and s in text[:ends])]
    assert seen == cut
    assert answer.stopped == bool(found)
    assert bytes(report.token_id for report in tokens).decode(errors="strict") == seen
