"""Streams text. Oracle: decoding all ids at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.input.tokenizer import Tokenizer
from octavo.output.detokenizer import Detokenizer

TEXTS = [
    "plain words, 123",
    "🫠 🥹 龜",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",  # sequences joined by ZWJ, a variation selector, a skin tone
    "汉字かな交じり文、한국어",
    "e\u0301 n\u0303 क्षि \u0e01\u0e33",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


def stream(detokenizer: Detokenizer, steps: list[list[int]]) -> list[str]:
    deltas = [detokenizer.push(step) for step in steps]
    return [*deltas, detokenizer.finish()]


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    steps = []
    for size in sizes:
        steps.append(ids[:size])
        ids = ids[size:]
    return [*steps, ids]


@given(
    ids=st.lists(st.integers(0, 49200), max_size=60),
    sizes=st.lists(st.integers(0, 4), max_size=60),
    skip=st.booleans(),
)
@settings(max_examples=300)
def test_any_ids_in_any_steps_give_the_text_of_all(
    smollm2_tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(smollm2_tokenizer, skip_special_tokens=skip)
    deltas = stream(detokenizer, cut(ids, sizes))
    assert "".join(deltas) == smollm2_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_real_text_comes_in_whole_characters(smollm2_tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = smollm2_tokenizer.encode(text)
    detokenizer = Detokenizer(smollm2_tokenizer, skip_special_tokens=skip)
    deltas = stream(detokenizer, [[token_id] for token_id in ids])
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == smollm2_tokenizer.decode(ids, skip_special_tokens=skip)
    if not skip:
        assert "".join(deltas) == text


def test_a_character_is_held_back_until_it_is_whole(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("🥹")
    detokenizer = Detokenizer(smollm2_tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "🥹"]


def test_a_cut_off_character_is_flushed_as_a_replacement(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("ok 🥹")
    detokenizer = Detokenizer(smollm2_tokenizer)
    assert detokenizer.push(ids[:-1]) == "ok "
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_what_is_held_back_is_bounded(smollm2_tokenizer: Tokenizer) -> None:
    (lead,) = [i for i in range(49152) if smollm2_tokenizer.token_bytes(i) == b"\xf0"]
    detokenizer = Detokenizer(smollm2_tokenizer)
    text = ""
    for num_pushed in range(1, 2001):
        text += detokenizer.push([lead])
        assert num_pushed - len(text) <= 3
    text += detokenizer.finish()
    assert text == "\ufffd" * 2000 == smollm2_tokenizer.decode([lead] * 2000)


class Spaced:
    """Tokens "", " ", " a", "b" and a special one; the first with any bytes loses a space."""

    special_ids = frozenset({4})

    def token_bytes(self, token_id: int) -> bytes:
        return [b"", b" ", b" a", b"b", b"<s>"][token_id]

    def first_token_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id).removeprefix(b" ")


@given(
    ids=st.lists(st.integers(0, 4), max_size=12),
    sizes=st.lists(st.integers(0, 3), max_size=8),
    skip=st.booleans(),
)
def test_the_space_before_a_text_is_taken_away_once(ids: list[int], sizes: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(Spaced(), skip_special_tokens=skip)
    deltas = stream(detokenizer, cut(ids, sizes))
    shown = [token_id for token_id in ids if not (skip and token_id == 4)]
    text = b"".join(map(Spaced().token_bytes, shown)).decode()
    assert "".join(deltas) == text.removeprefix(" ")
