"""Stop strings. Oracle: looking for them in the whole text, and in each beginning of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.output.stop import StopChecker

#: Few characters, so that stops are found, overlap and nearly match.
texts = st.text(st.sampled_from("ab🥹"), max_size=24)
stop_lists = st.lists(st.text(st.sampled_from("ab🥹"), min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], *, include_stop: bool) -> str | None:
    """The text up to its first stop; None where it has none."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include_stop else text[: end - max(map(len, complete))]
    return None


def longest_beginning(text: str, stops: list[str]) -> str:
    """The longest end of the text with which a stop begins."""
    return max(
        (text[i:] for i in range(len(text) + 1) if any(s.startswith(text[i:]) for s in stops)),
        key=len,
        default="",
    )


@given(text=texts, stops=stop_lists, include_stop=st.booleans(), sizes=st.lists(st.integers(0, 4)))
@example(text="aab", stops=["aab", "ab"], include_stop=False, sizes=[1, 1, 1])
@example(text="aabaab", stops=["aabaaa", "ba"], include_stop=False, sizes=[5])
def test_any_text_in_any_pieces(text: str, stops: list[str], include_stop: bool, sizes: list[int]) -> None:
    checker = StopChecker(stops, include_stop=include_stop)
    given_out, at = "", 0
    for size in [*sizes, len(text)]:
        piece, at = text[at : at + size], min(at + size, len(text))
        given_out += checker.push(piece)
        expected = cut(text[:at], stops, include_stop=include_stop)
        assert checker.stopped == (expected is not None)
        if expected is None:  # nothing is held back but what may yet be a stop
            assert given_out + longest_beginning(text[:at], stops) == text[:at]
        else:
            assert given_out == expected
    given_out += checker.finish()
    expected = cut(text, stops, include_stop=include_stop)
    assert given_out == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("stops", "text", "released"),
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo"),
        (["END", "N"], "the END", "the E"),  # N is complete before END is
        (["END", "ND"], "the END", "the "),  # complete together: the one that began first
        (["EN", "END"], "the END", "the "),
        (["aaab"], "aaaaaab!", "aaa"),
        (["🥹"], "a🥹b", "a"),
        (["x"], "x", ""),
        ([], "anything", "anything"),
    ],
)
def test_the_first_stop_to_be_complete(stops: list[str], text: str, released: str) -> None:
    checker = StopChecker(stops)
    assert "".join([*map(checker.push, text), checker.finish()]) == released
    assert checker.stopped == bool(stops)
    assert checker.push("more") == ("" if stops else "more")


@given(text=texts, stops=stop_lists, armed=st.integers(0, 24), size=st.integers(1, 5))
@example(text="aaaa", stops=["aa"], armed=3, size=1)
@example(text="abab", stops=["abab", "ab"], armed=3, size=2)
def test_stops_are_passed_over_until_armed(text: str, stops: list[str], armed: int, size: int) -> None:
    """A stop that is complete before character `armed` is no stop; one that began before it may be."""
    checker = StopChecker(stops)
    pieces = [text[at : at + size] for at in range(0, armed - armed % size, size)]
    given_out = "".join(checker.push(piece, armed=False) for piece in pieces)
    at = min(len(text), armed - armed % size)
    given_out += checker.push(text[at:]) + checker.finish()
    ends = [end for end in range(at + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    found = max((len(stop) for stop in stops if ends and text[: ends[0]].endswith(stop)), default=0)
    assert checker.stopped == bool(ends)
    expected = text[: ends[0] - found] if ends else text
    assert given_out == expected
