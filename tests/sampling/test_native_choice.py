"""The native backend's choices are those of sampling/choice.py, whatever build of it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.base import ChoosesTokens
from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.sampling.choice import choose
from octavo.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")


@pytest.fixture(scope="module", params=["scalar", "auto"])
def backend(request: pytest.FixtureRequest) -> Iterator[NativeBackend]:
    made = NativeBackend(num_threads=2, isa=request.param)
    yield made
    made.close()


def assert_same_choices(
    backend: NativeBackend, logits: Logits, params: list[SamplingParams], position: int = 9
) -> None:
    positions = list(range(position, position + len(params)))
    expected = choose(list(logits), params, positions)
    assert backend.choose(list(logits), params, positions) == expected
    assert backend.choose(logits, params, positions) == expected


def test_it_says_that_it_can(backend: NativeBackend) -> None:
    assert isinstance(backend, ChoosesTokens)
    assert backend.choose([], [], []) == []


PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 5e-324, 1e-6, 1e-5, 0.3, 1.0, 2.0, 1e30, 1e300]),
    top_k=st.sampled_from([0, 1, 5, 40, 100, 2**31 - 1]),
    top_p=st.sampled_from([5e-324, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
)
VALUES = st.sampled_from(["normal", "rounded", "flat", "masked", "huge", "peaked"])


def draw_logits(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Logits:
    values = rng.normal(0, 3, shape)
    match kind:
        case "rounded":  # ties
            values = np.round(values)
        case "flat":
            values = np.zeros(shape)
        case "masked":
            values[rng.random(shape) < 0.9] = -np.inf
        case "huge":
            values = values * 1e37
        case "peaked":
            values[:, :3] += 40
    return values.astype(np.float32)


@settings(max_examples=300)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    kind=VALUES,
    width=st.one_of(st.integers(1, 400), st.sampled_from([64, 65, 1000, 5000])),
    seed=st.integers(0, 99),
    position=st.integers(0, 2**31 - 9),
)
def test_the_same_tokens(
    backend: NativeBackend, params: list[SamplingParams], kind: str, width: int, seed: int, position: int
) -> None:
    assert_same_choices(
        backend, draw_logits(kind, np.random.default_rng(seed), (len(params), width)), params, position
    )


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 0.6}, {"top_p": 0.95}, {"top_p": 0.9999}, {"top_k": 50}, {"top_k": 5000},
        {"min_p": 1e-3},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.001, 1.0, 6.0])
def test_a_whole_vocabulary(backend: NativeBackend, fields: dict[str, Any], spread: float) -> None:
    """Of a size that no chunk divides; few tokens are likely, or nearly all."""
    rng = np.random.default_rng(5)
    logits = (rng.normal(0, spread, (6, 50_003))).astype(np.float32)
    assert_same_choices(backend, logits, [SamplingParams(seed=seed, **fields) for seed in range(6)])


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 199), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=5),
    st.booleans(),
)
def test_what_is_no_number(
    backend: NativeBackend, width: int, poison: list[tuple[int, float]], masked: bool
) -> None:
    """The complement of the id that says where: of the first NaN, else of the largest."""
    logits = np.full((1, width), -np.inf if masked else 0.5, np.float32)
    for place, value in poison:
        logits[0, place % width] = value
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.5)):
        assert_same_choices(backend, logits, [params])


def test_nothing_of_the_request_before_is_left_in_a_row(backend: NativeBackend) -> None:
    """Ties, which noise would decide: who samples leaves nothing to the greedy, nor the other way round."""
    logits = np.zeros((1, 200), np.float32)
    sampled, filtered = SamplingParams(seed=3), SamplingParams(seed=4, top_k=3, top_p=0.5, min_p=0.1)
    greedy, nearly = SamplingParams(temperature=0), SamplingParams(seed=5, temperature=1e-6)
    for params in (sampled, greedy, filtered, nearly, sampled, filtered, greedy):
        assert_same_choices(backend, logits, [params])


def test_a_row_alone_is_the_row_in_any_batch(backend: NativeBackend) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (40, 3001)).astype(np.float32)
    params = [
        SamplingParams(seed=i, top_p=0.9) if i % 3 else SamplingParams(temperature=0) for i in range(40)
    ]
    together = backend.choose(list(logits), params, list(range(40)))
    alone = [backend.choose([logits[i].copy()], [params[i]], [i])[0] for i in range(40)]
    assert together == alone
