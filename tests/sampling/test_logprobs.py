"""Logprobs against torch's log_softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0, 1e30])
def test_against_log_softmax(scale: float) -> None:
    logits = (np.random.default_rng(0).normal(size=1000) * scale).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=0).numpy()
    best = np.argsort(-logits, kind="stable")
    for token_id in (int(best[0]), int(best[1]), int(best[500]), int(best[-1])):
        found = token_logprobs(logits, token_id, 20)
        assert found.token_id == token_id
        assert found.logprob == pytest.approx(expected[token_id], rel=1e-12, abs=1e-12)
        assert found.rank == 1 + best.tolist().index(token_id)
        assert [i for i, _ in found.top] == best[:20].tolist()
        assert [p for _, p in found.top] == pytest.approx(expected[best[:20]].tolist(), rel=1e-12, abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=2, max_size=12), st.integers(0, 12))
def test_ranks_and_ties(values: list[float], count: int) -> None:
    values[1] = 1.5
    logits = np.array(values, np.float32)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    for token_id in range(len(values)):
        found = token_logprobs(logits, token_id, count)
        assert found.rank == 1 + order.index(token_id)
        assert [i for i, _ in found.top] == order[:count]


def test_probabilities_sum_to_one() -> None:
    logits = np.random.default_rng(1).normal(0, 5, 300).astype(np.float32)
    found = token_logprobs(logits, 0, 300)
    assert sum(np.exp(p) for _, p in found.top) == pytest.approx(1.0, rel=1e-12)


def test_none_asked_for() -> None:
    assert token_logprobs(np.zeros(4, np.float32), 2, 0).top == []
