"""Log-probabilities of the model's own distribution, before bias, penalties and temperature.

Rule: a row is reduced alone, in float64, so its numbers don't depend on the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.messages import TokenLogprobs
from octavo.sampling.top_k_top_p import largest


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """The logprob and rank of a token, and the `count` likeliest tokens, from logits [vocab]."""
    values = logits.astype(np.float64)
    peak = values.max()
    normalizer = peak + np.log(np.exp(values - peak).sum())
    value = values[token_id]
    rank = 1 + int((values > value).sum()) + int((values[:token_id] == value).sum())
    top = [(int(i), float(values[i] - normalizer)) for i in largest(values, count)] if count else []
    return TokenLogprobs(token_id=token_id, logprob=float(value - normalizer), rank=rank, top=top)
