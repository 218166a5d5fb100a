"""Which token comes next, given a row of logits: the contract, in numpy.

The likeliest token of the largest logit, ties to the smaller id; or, with a temperature, the token whose
scaled logit plus Gumbel noise is the largest, ties to the smaller id, among the candidates. Rule: each row
is a function of its logits, parameters and position. A backend may bring its own `Choose`; it gives the same
tokens (the native one is csrc/cpu/choice.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from octavo.sampling.rng import gumbel
from octavo.sampling.top_k_top_p import candidates
from octavo.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]

#: Rows of logits [vocab]: one by one, or an array of them.
LogitsRows = Sequence[Logits] | Logits

#: Chooses a token for each row of logits, with its parameters, for its position. A row that is not to be
#: sampled from gives ~id, which is negative: there is its first NaN, or its largest logit, which is infinite.
Choose = Callable[[LogitsRows, Sequence[SamplingParams], Sequence[int]], list[int]]


def choose(logits: LogitsRows, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """See Choose."""
    token_ids = [_choose(*row) for row in zip(logits, params, positions, strict=True)]
    return [i if np.isfinite(values[i]) else ~i for i, values in zip(token_ids, logits, strict=True)]


def _choose(logits: Logits, params: SamplingParams, position: int) -> int:
    token_id = int(np.argmax(logits))  # the first NaN, if there is one
    if params.greedy or not np.isfinite(logits[token_id]):
        return token_id
    assert params.seed is not None, "InputProcessor draws missing seeds"
    ids = candidates(logits, params)
    scaled = logits[ids].astype(np.float64) / params.temperature
    return int(ids[np.argmax(scaled + gumbel(params.seed, position, ids))])
