"""A row is sampled from the right distribution, alone, and the same whatever it is sampled with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import SampledToken
from octavo.sampling.sampler import SamplingRow, sample
from octavo.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
GARBAGE = [4, 4, 1]  # behind the tokens that are known


def row(params: SamplingParams, *, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> SamplingRow:
    return SamplingRow(
        request_id="r",
        params=params,
        num_prompt=len(prompt),
        token_ids=np.array([*prompt, *output, *GARBAGE], np.int32),
    )


def draw(logits: Logits, params: SamplingParams, position: int = 5) -> int:
    (token,) = sample(logits[None], [row(params)], [position])
    assert token.error is None
    return token.token_id


# -- distributions ------------------------------------------------------------------------------

LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.0], np.float32)
NUM_DRAWS = 4000


def expected_distribution(params: SamplingParams) -> npt.NDArray[np.float64]:
    """The definition of each filter, on probabilities."""
    p = np.exp(LOGITS.astype(np.float64) / params.temperature)
    p /= p.sum()
    if params.min_p:
        p = np.where(p >= params.min_p * p.max() * (1 - 1e-12), p, 0)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=11),
        SamplingParams(seed=12, temperature=0.5),
        SamplingParams(seed=13, temperature=3.0),
        SamplingParams(seed=14, top_k=3),
        SamplingParams(seed=15, top_p=0.8),
        SamplingParams(seed=16, min_p=0.3),
        SamplingParams(seed=17, temperature=0.7, min_p=0.05, top_k=6, top_p=0.9),
    ],
    ids=lambda p: f"T={p.temperature} k={p.top_k} p={p.top_p} min={p.min_p}",
)
def test_chi_square(params: SamplingParams) -> None:
    """Draws at successive positions. The bound is the 1 - 1e-4 quantile of chi-square by Wilson and
    Hilferty; seeds are fixed, so a pass is a pass for good."""
    logits = np.broadcast_to(LOGITS, (NUM_DRAWS, LOGITS.size))
    tokens = sample(logits, [row(params)] * NUM_DRAWS, range(NUM_DRAWS))
    counts = np.bincount([token.token_id for token in tokens], minlength=LOGITS.size)
    p = expected_distribution(params)
    assert (counts[p == 0] == 0).all()
    kept = p > 0
    statistic = float((((counts - NUM_DRAWS * p) ** 2)[kept] / (NUM_DRAWS * p[kept])).sum())
    freedom = int(kept.sum()) - 1
    h = 2 / (9 * freedom)
    assert statistic < freedom * (1 - h + 3.719 * math.sqrt(h)) ** 3


def test_seeds_give_the_same_distribution_as_positions() -> None:
    counts = np.bincount([draw(LOGITS, SamplingParams(seed=s)) for s in range(4000)], minlength=LOGITS.size)
    p = expected_distribution(SamplingParams(seed=0))
    assert (np.abs(counts - 4000 * p) < 4.5 * np.sqrt(4000 * p * (1 - p))).all()


# -- greedy, and as good as greedy ----------------------------------------------------------------


def test_greedy_takes_the_smallest_id_of_equals() -> None:
    logits = np.array([0.0, 3.0, -1.0, 3.0, 3.0], np.float32)
    assert draw(logits, SamplingParams(temperature=0)) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, temperature=1e-4),
        SamplingParams(seed=1, temperature=1e-6),
        SamplingParams(seed=1, temperature=5e-324),
        SamplingParams(seed=1, top_p=1e-4),
        SamplingParams(seed=1, top_k=1),
        SamplingParams(seed=1, min_p=1.0),
    ],
    ids=["T=1e-4", "T=1e-6", "T=5e-324", "top_p=1e-4", "top_k=1", "min_p=1"],
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_as_good_as_greedy(params: SamplingParams, scale: float) -> None:
    logits = (np.random.default_rng(3).normal(size=1000) * scale).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for position in range(20):
            assert draw(logits, params, position) == int(logits.argmax())


def test_an_enormous_temperature_is_uniform_and_quiet() -> None:
    tokens = [draw(LOGITS, SamplingParams(seed=2, temperature=1e300), p) for p in range(200)]
    assert set(tokens) == set(range(8))


# -- rows don't know each other -------------------------------------------------------------------

PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 7: -100.0}]),
    logprobs=st.sampled_from([None, 0, 4]),
)
POISON = st.sampled_from([None, None, None, np.nan, np.inf, -np.inf])


@given(st.lists(st.tuples(PARAMS, POISON, st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 9))
def test_a_row_alone_is_the_row_in_any_batch(
    batch: list[tuple[SamplingParams, float | None, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(batch), 101)).astype(np.float32)  # odd: rows are aligned differently
    rows, positions = [], []
    for values, (params, poison, known) in zip(logits, batch, strict=True):
        if poison is not None:
            values[rng.integers(101)] = poison
        rows.append(row(params, prompt=[1, 2, 2], output=rng.integers(0, 101, known).tolist()))
        positions.append(3 + known)
    together = sample(logits, rows, positions)
    alone = [
        sample(values.copy()[None], [r], [position])[0]
        for values, r, position in zip(logits, rows, positions, strict=True)
    ]
    assert together == alone


def test_order_does_not_matter() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    rows = [row(SamplingParams(seed=i, logprobs=2)) for i in range(6)]
    forward = sample(logits, rows, range(6))
    assert sample(logits[::-1], rows[::-1], range(6)[::-1]) == forward[::-1]


def test_the_same_seed_and_position_give_the_same_token() -> None:
    params = SamplingParams(seed=2**64 - 1)
    first = [draw(LOGITS, params, position) for position in range(50)]
    assert [draw(LOGITS, params, position) for position in reversed(range(50))] == first[::-1]
    assert [draw(LOGITS, SamplingParams(seed=3), position) for position in range(50)] != first


def test_logits_are_not_touched() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(seed=1, logit_bias={3: 5}, repetition_penalty=2, presence_penalty=1, top_k=3)
    logits.flags.writeable = False
    sample(logits, [row(params, prompt=[1], output=[2, 2])], [3])
    assert np.array_equal(logits, before)


# -- what can't be sampled from -------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=1, logprobs=2)])
@pytest.mark.parametrize(
    ("poison", "says"),
    [([np.nan], "nan"), ([np.inf], "inf"), ([-np.inf] * 8, "-inf"), ([np.inf, np.nan], "nan")],
    ids=["nan", "inf", "all -inf", "both"],
)
def test_no_numbers_are_an_error_of_their_row(poison: list[float], says: str, params: SamplingParams) -> None:
    logits = np.stack([LOGITS, LOGITS, LOGITS])
    logits[1, : len(poison)] = poison
    before, bad, after = sample(logits, [row(params)] * 3, [9] * 3)
    assert before == after
    assert before.error is None
    assert isinstance(bad, SampledToken)
    assert (bad.token_id, bad.position, bad.logprobs) == (-1, 9, None)
    assert bad.error is not None
    assert f"hold {says}, not a number to sample from" in bad.error


def test_a_masked_token_is_never_taken() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[17, 30]] = 0.0
    for params in (SamplingParams(seed=4), SamplingParams(seed=4, top_k=10, top_p=0.99)):
        assert {draw(logits, params, position) for position in range(40)} == {17, 30}


def test_bias_comes_before_penalties_and_temperature() -> None:
    """2 + 3 = 5, halved by the penalty: 2.5. The other order would give 1 + 3 = 4 and win."""
    logits = np.array([2.0, 3.0], np.float32)
    params = SamplingParams(temperature=0, logit_bias={0: 3.0}, repetition_penalty=2.0)
    (token,) = sample(logits[None], [row(params, prompt=[0])], [1])
    assert token.token_id == 1


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=0, logit_bias={6: 100.0}, logprobs=1)
    (token,) = sample(LOGITS[None], [row(params)], [5])
    assert token.token_id == 6
    assert token.logprobs is not None
    assert token.logprobs.rank == 8
    assert token.logprobs.top[0][0] == 0
