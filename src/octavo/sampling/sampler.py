"""From logits to tokens.

Order: bias, bans and penalties, here; then temperature, min_p, top_k, top_p and Gumbel noise, in `choice`.
Rule: each row is sampled alone, from its own logits, parameters and ids, so what shares the batch can't touch
it; a row whose logits are no numbers is an error, never token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.messages import SampledToken
from octavo.sampling.choice import Choose, Logits, LogitsRows, choose
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.penalties import adjust, needs_adjustment
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What sampling needs to know of a request, whatever the step.

    token_ids [max_model_len]: the prompt's, then the output's; from the position to be sampled on they mean
    nothing. stop_ids end the request, so that they are not sampled before min_tokens.
    """

    request_id: str
    params: SamplingParams
    num_prompt: int
    token_ids: npt.NDArray[np.int32]
    stop_ids: tuple[int, ...] = ()


def sample(
    logits: LogitsRows, rows: Sequence[SamplingRow], positions: Sequence[int], choose: Choose = choose
) -> list[SampledToken]:
    """Sample a token for each row of logits, for its position. choose: of a backend that has its own."""
    params = [row.params for row in rows]
    adjusted = logits
    if any(map(needs_adjustment, params)):
        adjusted = [_adjusted(*row) for row in zip(logits, rows, positions, strict=True)]
    token_ids = choose(adjusted, params, positions)
    sampled = []
    for i, token_id in enumerate(token_ids):
        row, position, logprobs, error = rows[i], positions[i], None, None
        if token_id < 0:
            error = _no_number(float(adjusted[i][~token_id]), position)
            token_id = -1
        elif row.params.logprobs is not None:
            logprobs = token_logprobs(logits[i], token_id, row.params.logprobs)
        sampled.append(
            SampledToken(
                request_id=row.request_id,
                position=position,
                token_id=token_id,
                logprobs=logprobs,
                error=error,
            )
        )
    return sampled


def _adjusted(raw: Logits, row: SamplingRow, position: int) -> Logits:
    if not needs_adjustment(row.params):
        return raw
    prompt_ids, output_ids = row.token_ids[: row.num_prompt], row.token_ids[row.num_prompt : position]
    return adjust(raw, row.params, prompt_ids, output_ids, row.stop_ids)


def _no_number(value: float, position: int) -> str:
    return (
        f"the model's logits at position {position} hold {value}, not a number to sample from; the "
        "checkpoint or its numeric format is damaged"
    )
