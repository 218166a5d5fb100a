"""Which tokens may be sampled at all: min_p, then top_k, then top_p.

Rule: ties break by token id, smaller first, so a set is the same whatever sorted it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams

Scaled = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]

#: How many tokens top_p sorts at first.
_FIRST_SORTED = 256


def candidates(scaled: Scaled, params: SamplingParams) -> TokenIds:
    """Ids that survive the filters, of logits [vocab] divided by the temperature. Never empty."""
    if params.min_p > 0.0:
        ids = np.flatnonzero(scaled >= scaled.max() + np.log(params.min_p))
    else:
        ids = np.arange(scaled.shape[0])
    if 0 < params.top_k < ids.shape[0]:
        ids = _largest(scaled, ids, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(scaled, ids, params.top_p)
    return ids


def largest(values: npt.NDArray[np.floating], count: int) -> TokenIds:
    """The ids of the `count` largest values [vocab], largest first."""
    ids = np.arange(values.shape[0])
    if count < ids.shape[0]:
        ids = _largest(values, ids, count)
    return _by_value(values, ids)


def _largest(values: npt.NDArray[np.floating], ids: TokenIds, count: int) -> TokenIds:
    kept = values[ids]
    threshold = np.partition(kept, kept.shape[0] - count)[kept.shape[0] - count]
    above = ids[kept > threshold]
    equal = ids[kept == threshold][: count - above.shape[0]]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(scaled: Scaled, ids: TokenIds, top_p: float) -> TokenIds:
    """The fewest of the likeliest tokens whose probabilities reach top_p.

    Only as many are sorted as it takes: a nucleus is small, a vocabulary is not.
    """
    peak = scaled[ids].max()
    enough = top_p * np.exp(scaled[ids] - peak).sum()
    count = _FIRST_SORTED
    while True:
        likeliest = _by_value(scaled, _largest(scaled, ids, count) if count < ids.shape[0] else ids)
        reached = np.cumsum(np.exp(scaled[likeliest] - peak)) >= enough
        if reached.any():
            return np.sort(likeliest[: int(np.argmax(reached)) + 1])
        if count >= ids.shape[0]:
            return ids  # rounding kept the sum just below
        count *= 16


def _by_value(values: npt.NDArray[np.floating], ids: TokenIds) -> TokenIds:
    return ids[np.argsort(-values[ids], kind="stable")]
