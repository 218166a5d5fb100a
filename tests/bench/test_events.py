"""Server-sent events and chunks, however they are cut and whoever wrote them."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.events import EventReader, body_message, read_chunk


@given(
    values=st.lists(st.text(st.sampled_from('ab:é "\\'), max_size=6), max_size=6),
    newline=st.sampled_from(["\n", "\r\n"]),
    space=st.sampled_from(["", " "]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_events_do_not_depend_on_the_cuts(
    values: list[str], newline: str, space: str, cuts: list[int]
) -> None:
    events = [json.dumps(value) for value in values]
    lines = [f": a comment{newline}event: x{newline}data:{space}{each}{newline}{newline}" for each in events]
    stream = "".join(lines).encode()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = EventReader()
    found = [event for a, b in pairwise(edges) for event in reader.feed(stream[a:b])]
    assert [event.decode() for event in found] == events


def test_lines_of_data_are_one_event() -> None:
    assert EventReader().feed(b"data: {\ndata: }\n\ndata: 1\n") == [b"{\n}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"choices":[{"delta":{"content":"a"}}]}', True),
        ('{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        ('{"choices":[{"delta":{"reasoning_content":"hm"}}]}', True),
        ('{"choices":[{"delta":{"reasoning":"hm","content":null}}]}', True),
        ('{"choices":[{"delta":{},"finish_reason":"stop"}]}', False),
        ('{"choices":[{"text":"a","logprobs":null,"unknown":[1,{"x":2}]}]}', True),
        ('{"choices":[{"text":"","finish_reason":"length"}]}', False),
    ],
)
def test_what_is_text(text: str, expected: bool) -> None:
    assert read_chunk(text).choices[0].has_text is expected


def test_usage() -> None:
    chunk = read_chunk('{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}')
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.cached_tokens) == (9, 4, 0)
    details = '{"usage":{"prompt_tokens_details":{"cached_tokens":8}}}'
    assert read_chunk(details).usage.cached_tokens == 8  # type: ignore[union-attr]
    with pytest.raises(msgspec.DecodeError):
        read_chunk('{"choices":7}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too long","code":400}}', "too long"),
        (b'{"error":"overloaded"}', "overloaded"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"message":{"error":"deep"}}', "deep"),
        (b'{"odd":1}', "{'odd': 1}"),
        (b"[1]", "[1]"),
        (b"<html>502</html>\n", "<html>502</html>"),
        (b"\xff" * 1000, "\ufffd" * 400),
        (b"", ""),
    ],
)
def test_the_sentence_in_an_error(body: bytes, message: str) -> None:
    assert body_message(body) == message
