"""What callers get back.

Rule: a `RequestOutput` is a value. The text so far and the newest piece of it are both there, so
that a caller who streams and one who waits read the same object.
"""

from __future__ import annotations

import msgspec

from octavo.messages import TokenLogprobs
from octavo.request import FinishReason


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one request after a step.

    text and token_ids: everything generated so far. delta and new_token_ids: what this step
    added. logprobs: one for each token generated here (none for what a resumed request came with).
    seed: the seed that repeats this output.
    """

    request_id: str
    text: str
    delta: str
    token_ids: list[int]
    new_token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = []
    seed: int | None = None

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None
