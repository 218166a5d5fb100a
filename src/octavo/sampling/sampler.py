"""From logits to tokens.

Order: bias, bans and penalties, here; then temperature, min_p, top_k, top_p and Gumbel noise, in `choice`.
Rule: each row is sampled alone, from its own logits, parameters and ids, so what shares the batch can't touch
it; a row whose logits are no numbers is an error, never token 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.messages import SampledToken
from octavo.sampling.choice import Choose, Logits, choose
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.penalties import adjust, needs_adjustment
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


def sample(
    logits: Iterable[Logits], rows: Sequence[SamplingRow], choose: Choose = choose
) -> list[SampledToken]:
    """Sample a token for each row of logits [rows, vocab]. choose: of a backend that has its own."""
    raw = list(logits)
    adjusted = [_adjusted(values, row) for values, row in zip(raw, rows, strict=True)]
    token_ids = choose(adjusted, [row.params for row in rows], [row.position for row in rows])
    return [_sampled(*parts) for parts in zip(raw, adjusted, rows, token_ids, strict=True)]


def _adjusted(raw: Logits, row: SamplingRow) -> Logits:
    if not needs_adjustment(row.params):
        return raw
    return adjust(raw, row.params, row.prompt_ids, row.output_ids, row.stop_ids)


def _sampled(raw: Logits, adjusted: Logits, row: SamplingRow, token_id: int) -> SampledToken:
    value = adjusted.item(token_id)
    if not math.isfinite(value):
        return SampledToken(
            request_id=row.request_id,
            position=row.position,
            token_id=-1,
            error=f"the model's logits at position {row.position} hold {value}, not a number to "
            "sample from; the checkpoint or its numeric format is damaged",
        )
    wanted = row.params.logprobs
    return SampledToken(
        request_id=row.request_id,
        position=row.position,
        token_id=token_id,
        logprobs=None if wanted is None else token_logprobs(raw, token_id, wanted),
    )
