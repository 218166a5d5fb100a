"""Which tokens may be sampled at all: min_p, then top_k, then top_p.

Rule: ties break by token id, smaller first, so a set is the same whatever sorted it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams

Scaled = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]


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
    """The fewest of the likeliest tokens whose probabilities reach top_p."""
    ids = _by_value(scaled, ids)
    weights = np.exp(scaled[ids] - scaled[ids[0]])
    reached = np.cumsum(weights) >= top_p * weights.sum()
    return np.sort(ids[: int(np.argmax(reached)) + 1] if reached.any() else ids)


def _by_value(values: npt.NDArray[np.floating], ids: TokenIds) -> TokenIds:
    return ids[np.argsort(-values[ids], kind="stable")]
