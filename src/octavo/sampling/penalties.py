"""What changes logits before a token is chosen: bias, bans and penalties.

Rule: each is a function of the logits and the ids so far, a fold that restarts from the ids. The
repetition penalty (Keskar et al., CTRL) covers prompt and output; presence and frequency penalties
cover the output only, as OpenAI defines them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether `adjust` would change anything."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def adjust(
    logits: Logits,
    params: SamplingParams,
    prompt_ids: TokenIds,
    output_ids: TokenIds,
    stop_ids: Sequence[int] = (),
) -> Logits:
    """A copy of logits [vocab] with bias, bans, then penalties. stop_ids are banned before min_tokens."""
    logits = logits.copy()
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64)
        logits[ids] += np.fromiter(params.logit_bias.values(), np.float32)
    if output_ids.shape[0] < params.min_tokens:
        logits[list(stop_ids)] = -np.inf
    if params.repetition_penalty != 1.0:
        seen = np.union1d(prompt_ids, output_ids)
        values, penalty = logits[seen], np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(output_ids, return_counts=True)
        logits[seen] -= np.float32(params.presence_penalty)
        logits[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    return logits
