"""Philox against its authors' vectors, and what makes a draw repeatable: no state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.rng import gumbel, philox, random_words

#: kat_vectors of Random123 (Salmon et al.), philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    low, high = words(key)
    found = philox(tuple(np.array([word], np.uint64) for word in words(counter)), (low, high))
    assert [int(word[0]) for word in found] == words(expected)


def test_a_token_reads_its_word_of_its_counter() -> None:
    """Word token % 4 of the counter (token // 4, position, 0, 0) under the key (low, high) of the seed."""
    low, high = words("a4093822 299f31d0")
    token_ids = np.array([0, 1, 2, 3, 4 * 0x243F6A8 + 2])
    found = random_words(high << 32 | low, 77, token_ids)
    for token_id, word in zip(token_ids.tolist(), found.tolist(), strict=True):
        counter = tuple(np.array([c], np.uint64) for c in (token_id // 4, 77, 0, 0))
        assert word == philox(counter, (low, high))[token_id % 4][0]


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 300_000), min_size=1, max_size=40, unique=True),
)
def test_the_noise_of_a_token_does_not_depend_on_the_others(seed: int, position: int, ids: list[int]) -> None:
    together = gumbel(seed, position, np.array(ids))
    alone = [gumbel(seed, position, np.array([token_id]))[0] for token_id in ids]
    assert together.tolist() == alone


def test_each_of_seed_position_and_token_matters() -> None:
    ids = np.arange(1000)
    base = random_words(1, 5, ids)
    others = [random_words(2, 5, ids), random_words(1 << 32 | 1, 5, ids), random_words(1, 6, ids)]
    for other in others:
        assert (base == other).mean() < 0.01
    assert len(np.unique(base)) > 995


def test_noise_is_finite_and_standard_gumbel() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is its 0.1% quantile."""
    noise = np.sort(gumbel(seed=7, position=0, token_ids=np.arange(200_000)))
    assert np.isfinite(noise).all()
    expected = np.exp(-np.exp(-noise))
    steps = np.arange(1, noise.size + 1) / noise.size
    assert np.abs(steps - expected).max() < 1.95 / np.sqrt(noise.size)


def test_the_ends_of_the_range_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = np.array([0, 2**32 - 1], np.uint64)
    monkeypatch.setattr("octavo.sampling.rng.random_words", lambda *_: ends)
    low, high = gumbel(0, 0, np.arange(2))
    assert low == pytest.approx(-np.log(33 * np.log(2)), rel=1e-9)
    assert high == pytest.approx(33 * np.log(2), rel=1e-9)
