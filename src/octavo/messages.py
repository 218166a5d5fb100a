"""One frozen message per arrow of a request's life.

    InputProcessor -EngineRequest-> EngineCore
    Scheduler -SchedulerOutput-> ModelRunner -ModelRunnerOutput-> Scheduler
    EngineCore -EngineOutput-> OutputProcessor

Rule: messages are data. Diffs are absolute (where to write, what to write), so applying one twice
changes nothing and a runner that lost its state is resynced by sending `NewRow` again.
"""

from __future__ import annotations

import msgspec

from octavo.observability.stats import RequestTimes
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised request with nothing left to decide: seed drawn, max_tokens filled in.

    `output_ids` is not empty when a request resumes what another engine began.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str = ""
    output_ids: list[int] = []


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a runner must know of a request that enters the batch, first time or resumed."""

    request_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    #: Tokens that end the request, which min_tokens keeps from being sampled.
    stop_ids: tuple[int, ...] = ()


class RowStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one request does in a step: tokens [start, start + num_tokens) of its positions.

    block_writes[group] = (index, block ids): block_table[group][index : index + n] = ids.
    samples: the step reaches the request's last token, so a token is sampled, for position
    `start + num_tokens`. long_rope: rotate as in sequences beyond the model's original context.
    prompt_logits: positions [first, end), all of this step, whose logits give the logprobs of the prompt's
    tokens that follow them.
    """

    request_id: str
    start: int
    num_tokens: int
    block_writes: list[tuple[int, list[int]]]
    samples: bool
    long_rope: bool = False
    prompt_logits: tuple[int, int] = (0, 0)

    @property
    def num_logits(self) -> int:
        """How many rows of logits it wants."""
        first, end = self.prompt_logits
        return end - first + self.samples


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step. `dropped` rows are freed before `new_rows` are taken.

    reset: free all rows first; what the runner knows may be wrong after an undone step.
    """

    step: int
    reset: bool
    dropped: list[str]
    new_rows: list[NewRow]
    rows: list[RowStep]
    num_tokens: int

    @property
    def num_sampled(self) -> int:
        """How many rows of logits are wanted: of the prompt's tokens, and of tokens to be sampled."""
        return sum(row.num_logits for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of the model's raw distribution at one position.

    rank: 1 for the most likely token. top: the most likely (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class SampledToken(msgspec.Struct, frozen=True, kw_only=True):
    """A row's sampled token, or the error that kept it from being sampled."""

    request_id: str
    position: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a prompt's tokens from position `start` on, or the error that there are none."""

    request_id: str
    start: int
    logprobs: list[TokenLogprobs]
    error: str | None = None


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced, in the order of the plan's rows."""

    step: int
    sampled: list[SampledToken]
    prompt_logprobs: list[PromptLogprobs] = []


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step added to one request. prompt_logprobs: with the first token, or the end; of all tokens of
    the prompt but the first. times, num_preemptions: given with the last output of one that the engine had
    taken."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    num_preemptions: int = 0
