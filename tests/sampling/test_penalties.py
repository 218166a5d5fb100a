"""Bias and penalties against `transformers` and against the formulas, written out."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.penalties import adjust, needs_adjustment
from octavo.sampling_params import SamplingParams

VOCAB = 24
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=20)


def ids(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def reference(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    values = [float(v) for v in logits]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *output}:
        if values[token] > 0:
            values[token] /= params.repetition_penalty
        else:
            values[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        values[token] -= params.presence_penalty + count * params.frequency_penalty
    return values


@given(
    st.integers(0, 99),
    IDS,
    IDS,
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([0.01, 0.7, 1.0, 1.2, 100.0]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
        frequency_penalty=st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
    ),
)
def test_against_the_formulas(
    seed: int, prompt: list[int], output: list[int], params: SamplingParams
) -> None:
    logits = np.random.default_rng(seed).normal(0, 4, VOCAB).astype(np.float32)
    found = adjust(logits, params, ids(prompt), ids(output))
    assert found.dtype == np.float32
    expected = np.array(reference(logits, params, prompt, output))
    # five float32 roundings of values up to (20 + 100) * 100 + 42
    np.testing.assert_allclose(found, expected, rtol=5 * 2.0**-24, atol=5 * 2.0**-24 * 150)
    if not needs_adjustment(params):
        assert np.array_equal(found, logits)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(1).normal(0, 4, VOCAB).astype(np.float32)
    prompt, output = [3, 3, 5, 9], [9, 11, 0]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), torch.from_numpy(logits.copy()[None])
    )
    found = adjust(logits, SamplingParams(repetition_penalty=penalty), ids(prompt), ids(output))
    np.testing.assert_allclose(found, theirs[0].numpy(), rtol=2**-23)


def test_presence_and_frequency_are_of_the_output_only() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    found = adjust(np.zeros(VOCAB, np.float32), params, ids([1, 1, 2]), ids([2, 3, 3, 3]))
    assert {i: float(v) for i, v in enumerate(found) if v} == {2: -1.5, 3: -2.5}


def test_a_fold_over_the_output() -> None:
    """What a resumed request computes is what it would have computed."""
    logits = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32)
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
    once = adjust(logits, params, ids([1, 2]), ids([3, 4, 3]))
    again = adjust(logits, params, ids([2, 1]), ids([3, 3, 4]))
    assert np.array_equal(once, again)


def test_nothing_to_do_is_known() -> None:
    assert not needs_adjustment(SamplingParams())
    assert not needs_adjustment(SamplingParams(temperature=0, top_k=3, min_p=0.1, seed=3, logprobs=3))
    for params in (
        SamplingParams(logit_bias={1: 0.0}),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
    ):
        assert needs_adjustment(params)


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_extreme_penalties_stay_numbers(penalty: float) -> None:
    logits = np.array([0.0, 1e30, -1e30, 1e-38], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = SamplingParams(repetition_penalty=penalty)
        found = adjust(logits, params, ids([0, 1, 2, 3]), ids([]))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("count", [0, 2, 3, 4])
def test_stops_are_banned_before_min_tokens(count: int) -> None:
    logits = np.zeros(VOCAB, np.float32)
    params = SamplingParams(
        min_tokens=3, logit_bias={5: 100, 6: 50}, repetition_penalty=2.0, presence_penalty=1.0
    )
    assert needs_adjustment(params)
    found = adjust(logits, params, ids([5]), ids([7] * count), stop_ids=(5, 9))
    banned = np.flatnonzero(np.isneginf(found)).tolist()
    assert banned == ([5, 9] if count < 3 else [])
    assert found.argmax() == (6 if count < 3 else 5)
