"""What a request is, while the engine works on it.

Rule: the scheduler is the only writer of a `Request`. Everything that can be derived from the
ids is derived, so a request restarts from (prompt_ids, output_ids) alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:  # messages.py imports this module
    from octavo.messages import TokenLogprobs


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # the request could not be computed


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()  # has no blocks and no row
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # waiting again; its blocks were dereferenced and may still be cached
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request's state.

    Token positions are [0, num_tokens). Of these, [0, num_computed_tokens) have their KV written by
    steps that have retired, [num_computed_tokens, num_scheduled_tokens) by steps in flight:

        0        num_computed          num_scheduled     num_tokens   num_tokens + num_pending
        |---------------|--------------------|----------------|-----------------|
          KV is there       being computed      known, to do     being sampled

    num_pending is the number of tokens that steps in flight will sample: their positions can be
    scheduled already, since the runner reads the sampled ids where it wrote them.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    priority: int
    arrival: float
    sequence: int  # order of arrival in this engine; ties never happen
    cache_salt: str = ""
    #: Whether its KV is of the rope for sequences beyond the model's original context.
    long_rope: bool = False
    output_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_pending: int = 0
    num_steps_in_flight: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    #: Tokens computed since the last preemption; a victim again only after one block of progress.
    progress_since_preemption: int = 0
    #: Of the prompt's tokens from the second on, as far as their steps have retired.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and retired output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens, known or being sampled, that no step has been given yet."""
        return self.num_tokens + self.num_pending - self.num_scheduled_tokens

    @property
    def num_prompt_logits(self) -> int:
        """Positions [0, this) are those whose logits give logprobs of the prompt."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt_ids) - 1

    @property
    def first_wanted_logits(self) -> int:
        """The first position whose logits are still wanted. What comes before may be found in a cache."""
        done = len(self.prompt_logprobs)
        return done if done < self.num_prompt_logits else self.num_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known token ids of positions [start, stop)."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return self.prompt_ids[start:] + self.output_ids[: stop - prompt]
