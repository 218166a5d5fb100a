"""What callers get back.

Rule: a `RequestOutput` is a value. The text so far and the newest piece of it are both there, so
that a caller who streams and one who waits read the same object. Making one costs what the step added,
not what came before: all outputs of a request share one `Transcript`, and each knows how much of it is its.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.messages import TokenLogprobs
from octavo.request import FinishReason


class Transcript:
    """Everything generated for one request. It only grows, so that what its outputs see of it stays."""

    __slots__ = ("logprobs", "pieces", "token_ids")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one request after a step.

    text and token_ids: everything generated so far. delta and new_token_ids: what this step
    added. logprobs: one for each token generated here (none for what a resumed request came with).
    seed: the seed that repeats this output. prompt_logprobs, where they were asked for: of each token of the
    prompt but the first. index: which of several answers to one request this is.

    text, token_ids and logprobs are put together when they are read: each costs its length.
    """

    request_id: str
    delta: str
    new_token_ids: list[int]
    prompt_tokens: int
    num_tokens: int
    transcript: Transcript
    num_pieces: int
    num_logprobs: int
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    seed: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    index: int = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.transcript.pieces[: self.num_pieces])

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far, `num_tokens` of them."""
        return self.transcript.token_ids[: self.num_tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities so far."""
        return self.transcript.logprobs[: self.num_logprobs]

    @property
    def new_logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of new_token_ids; none unless they were asked for."""
        count = len(self.new_token_ids)
        return self.transcript.logprobs[max(0, self.num_logprobs - count) : self.num_logprobs]

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None

    def as_dict(self) -> dict[str, Any]:
        """What a reader of the whole wants, by name."""
        return {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "logprobs": self.logprobs,
            "seed": self.seed,
        }
