"""Log-probabilities of the model's own distribution, before bias, penalties and temperature.

Rule: a row is reduced alone, in float64, so its numbers don't depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from octavo.messages import PromptLogprobs, TokenLogprobs
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


def prompt_logprobs(
    request_id: str,
    start: int,
    token_ids: Sequence[int],
    logits: Iterator[npt.NDArray[np.float32]],
    count: int,
) -> PromptLogprobs:
    """Logprobs of a prompt's tokens from position `start` on, from the next len(token_ids) rows of logits.

    Logits that are no numbers are an error, as they are where a token is sampled.
    """
    entries, error = [], None
    for position, token_id in enumerate(token_ids, start):
        values = next(logits)
        if np.isfinite(values).all():
            entries.append(token_logprobs(values, token_id, count))
        elif error is None:
            error = (
                f"the model's logits before position {position} of the prompt are not all numbers; the "
                "checkpoint or its numeric format is damaged"
            )
    return PromptLogprobs(request_id=request_id, start=start, logprobs=entries, error=error)
