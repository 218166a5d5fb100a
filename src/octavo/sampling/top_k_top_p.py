"""Which tokens may be sampled at all: min_p, then top_k, then top_p.

Rule: the likelier token is that of the larger logit, or of equals the one of the smaller id, so a set is the
same whatever sorted it. The native backend's choice.cpp finds the same sets.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from octavo.sampling.arithmetic import exp
from octavo.sampling_params import SamplingParams

Logits = npt.NDArray[np.floating]
TokenIds = npt.NDArray[np.int64]

#: How many tokens top_p sorts at first.
_FIRST_SORTED = 256
#: Of the likeliest token's weight.
_UNITS = 2.0**42


def candidates(logits: Logits, params: SamplingParams) -> TokenIds:
    """Ids that survive the filters, of logits [vocab], in their order. Never empty."""
    ids = np.arange(logits.shape[0])
    if params.min_p > 0.0:
        scaled = logits.astype(np.float64) / params.temperature
        ids = np.flatnonzero(scaled >= scaled.max() + np.log(params.min_p))
    if 0 < params.top_k < ids.shape[0]:
        ids = _largest(logits, ids, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(logits, ids, params)
    return ids


def largest(values: Logits, count: int) -> TokenIds:
    """The ids of the `count` largest values [vocab], largest first."""
    ids = np.arange(values.shape[0])
    if count < ids.shape[0]:
        ids = _largest(values, ids, count)
    return _by_value(values, ids)


def _largest(values: Logits, ids: TokenIds, count: int) -> TokenIds:
    kept = values[ids]
    threshold = np.partition(kept, kept.shape[0] - count)[kept.shape[0] - count]
    above = ids[kept > threshold]
    equal = ids[kept == threshold][: count - above.shape[0]]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(logits: Logits, ids: TokenIds, params: SamplingParams) -> TokenIds:
    """The fewest of the likeliest tokens whose probabilities reach top_p.

    Weights are whole numbers, so that it matters to no sum in what order it is taken. Only as many are sorted
    as it takes: a nucleus is small, a vocabulary is not.
    """
    scaled = logits[ids].astype(np.float64) / params.temperature
    weights = np.rint(exp(scaled - scaled.max()) * _UNITS).astype(np.int64)
    total = int(weights.sum())
    enough = min(total, math.ceil(params.top_p * float(total)))
    count = min(_FIRST_SORTED, ids.shape[0])
    while True:
        likeliest = largest(logits[ids], count)
        reached = np.cumsum(weights[likeliest]) >= enough
        if reached.any():
            return np.sort(ids[likeliest[: int(np.argmax(reached)) + 1]])
        count = min(count * 16, ids.shape[0])


def _by_value(values: Logits, ids: TokenIds) -> TokenIds:
    return ids[np.argsort(-values[ids], kind="stable")]
