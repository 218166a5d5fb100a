"""Which tokens survive min_p, top_k and top_p. Oracles: `transformers`' warpers, and plain Python."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.top_k_top_p import candidates, largest
from octavo.sampling_params import SamplingParams

Logits = npt.NDArray[np.float64]


def random_logits(seed: int, size: int = 200) -> Logits:
    return np.random.default_rng(seed).normal(0, 2, size)


def hf_survivors(warper: object, logits: Logits) -> list[int]:
    import torch

    kept = warper(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits[None]))  # type: ignore[operator]
    return torch.isfinite(kept[0]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value", [0.05, 0.3, 0.9, 0.999])
def test_top_p_like_transformers(value: float, seed: int) -> None:
    from transformers import TopPLogitsWarper

    logits = random_logits(seed)
    assert candidates(logits, SamplingParams(top_p=value)).tolist() == hf_survivors(
        TopPLogitsWarper(value), logits
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value", [1, 2, 50, 199, 200, 1000])
def test_top_k_like_transformers(value: int, seed: int) -> None:
    from transformers import TopKLogitsWarper

    logits = random_logits(seed)
    assert candidates(logits, SamplingParams(top_k=value)).tolist() == hf_survivors(
        TopKLogitsWarper(value), logits
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value", [0.001, 0.1, 0.5, 1.0])
def test_min_p_like_transformers(value: float, seed: int) -> None:
    from transformers import MinPLogitsWarper

    logits = random_logits(seed)
    assert candidates(logits, SamplingParams(min_p=value)).tolist() == hf_survivors(
        MinPLogitsWarper(value), logits
    )


def reference(logits: Logits, params: SamplingParams) -> list[int]:
    """One token at a time, likeliest first, smaller ids first among equals."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = logits[order[0]]
    if params.min_p:
        order = [i for i in order if logits[i] >= top + np.log(params.min_p)]
    if params.top_k:
        order = order[: params.top_k]
    weights = [float(np.exp(logits[i] - top)) for i in order]
    total, kept, so_far = float(np.sum(weights)), [], 0.0
    for i, weight in zip(order, weights, strict=True):
        kept.append(i)
        so_far += weight
        if so_far >= params.top_p * total:
            break
    return sorted(kept)


@given(
    st.lists(st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30).filter(
        lambda values: max(values) > -np.inf
    ),
    st.integers(0, 12),
    st.sampled_from([1e-4, 0.2, 0.5, 0.77, 0.93, 1.0]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_all_three_in_order_with_ties(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    logits = np.array(values)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    found = candidates(logits, params).tolist()
    if top_p == 1.0:  # it is off, and nothing is left out
        params = SamplingParams(top_k=top_k, min_p=min_p)
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        order = [i for i in order if not min_p or values[i] >= max(values) + np.log(min_p)]
        assert found == sorted(order[:top_k] if top_k else order)
    else:
        assert found == reference(logits, params)
    assert found
    assert found == sorted(set(found))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=1, max_size=20), st.integers(0, 25))
def test_largest(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    if count:
        assert largest(np.array(values), count).tolist() == expected


def test_top_p_of_almost_nothing_keeps_one() -> None:
    logits = random_logits(0)
    assert candidates(logits, SamplingParams(top_p=1e-4)).tolist() == [int(logits.argmax())]
    assert candidates(np.zeros(50), SamplingParams(top_p=5e-324)).tolist() == [0]


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
def test_top_p_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    """Nuclei of one token to nearly all, with ties: sorted in part or whole, they are the same."""
    logits = np.round(np.random.default_rng(0).normal(0, 1, 9000), 2) * spread
    assert candidates(logits, SamplingParams(top_p=top_p)).tolist() == reference(
        logits, SamplingParams(top_p=top_p)
    )
