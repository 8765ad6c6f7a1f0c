"""Stop strings: never shown, never missed, and no matter how the text came in pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.text.stop import StopChecker


def run(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stop)
    out = ""
    for piece in pieces:
        result = checker.push(piece)
        out += result.emit
        if result.stopped:
            return out, True
    return out + checker.flush(), False


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["a EN", "D b"], ("a ", True)),
        (["END"], ["a EN", "x"], ("a ENx", False)),
        (["END"], ["E", "N"], ("EN", False)),
        (["\n\n"], ["a\n", "\nb"], ("a", True)),
        (["bc", "abcd"], ["abcd"], ("a", True)),  # "bc" is complete before "abcd" is
        (["bc", "abc"], ["abc"], ("", True)),
        (["aab"], ["aa", "ab"], ("a", True)),
        (["👩‍👧"], ["👩", "\u200d", "👧!"], ("", True)),
        ([], ["anything"], ("anything", False)),
        ([""], ["anything"], ("anything", False)),
    ],
)
def test_stop_strings(stop: list[str], pieces: list[str], expected: tuple[str, bool]):
    assert run(stop, pieces) == expected


def one_by_one(stop: list[str], text: str) -> tuple[str, bool]:
    """The twin: read character by character and stop at the first that completes a stop string, or the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(deadline=None, max_examples=400)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
@example(stop=["bc", "abcd"], pieces=["abcd"])
def test_against_a_twin_that_reads_one_by_one(stop: list[str], pieces: list[str]):
    assert run(stop, pieces) == one_by_one(stop, "".join(pieces))


@settings(deadline=None, max_examples=200)
@given(stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), text=st.text("abc", max_size=12))
def test_only_what_may_become_a_stop_string_is_held_back(stop: list[str], text: str):
    checker = StopChecker(stop)
    out = ""
    for end, letter in enumerate(text, 1):
        result = checker.push(letter)
        out += result.emit
        if result.stopped:
            break
        held = text[len(out) : end]
        assert not held or any(s.startswith(held) for s in stop)


def test_after_a_stop_nothing_more_comes():
    checker = StopChecker(["."])
    assert checker.push("a.b").stopped
    again = checker.push("c")
    assert (again.emit, again.stopped, checker.flush()) == ("", True, "")
