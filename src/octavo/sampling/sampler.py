"""From logits to tokens.

Order: bias, bans, penalties, temperature, min_p, top_k, top_p, Gumbel noise; the largest wins, ties to the
smaller id. Rule: each row is sampled alone, from its own logits, parameters and ids, so what shares
the batch can't touch it; a row whose logits are no numbers is an error, never token 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.messages import SampledToken
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.penalties import adjust, needs_adjustment
from octavo.sampling.rng import gumbel
from octavo.sampling.top_k_top_p import candidates
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What sampling one row needs besides its logits. `position` is the new token's; stop_ids end the
    request, so that they are not sampled before min_tokens."""

    request_id: str
    position: int
    params: SamplingParams
    prompt_ids: npt.NDArray[np.int32]
    output_ids: npt.NDArray[np.int32]
    stop_ids: tuple[int, ...] = ()


def sample(logits: Iterable[npt.NDArray[np.float32]], rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample a token for each row of logits [rows, vocab]."""
    return [_sample_row(values, row) for values, row in zip(logits, rows, strict=True)]


def _sample_row(raw: npt.NDArray[np.float32], row: SamplingRow) -> SampledToken:
    params = row.params
    logits = raw
    if needs_adjustment(params):
        logits = adjust(raw, params, row.prompt_ids, row.output_ids, row.stop_ids)
    token_id = int(np.argmax(logits))  # the first NaN, if there is one
    if not np.isfinite(logits[token_id]):
        return SampledToken(
            request_id=row.request_id,
            position=row.position,
            token_id=-1,
            error=f"the model's logits at position {row.position} hold {logits[token_id]}, not a number to "
            "sample from; the checkpoint or its numeric format is damaged",
        )
    if not params.greedy:
        token_id = _draw(logits, row)
    wanted = params.logprobs
    return SampledToken(
        request_id=row.request_id,
        position=row.position,
        token_id=token_id,
        logprobs=None if wanted is None else token_logprobs(raw, token_id, wanted),
    )


def _draw(logits: npt.NDArray[np.float32], row: SamplingRow) -> int:
    params = row.params
    assert params.seed is not None, "InputProcessor draws missing seeds"
    scaled = logits.astype(np.float64) / params.temperature
    ids = candidates(scaled, params)
    return int(ids[np.argmax(scaled[ids] + gumbel(params.seed, row.position, ids))])
