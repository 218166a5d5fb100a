"""Makes a `RequestOutput` of what the engine adds to each request: the only writer of text.

Rule: text is a fold over the output ids. A request that resumes begins with the text of the ids it
already has, and goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.errors import InvalidRequestError
from octavo.messages import EngineOutput, EngineRequest, TokenLogprobs
from octavo.output.detokenizer import Detokenizer, Vocabulary
from octavo.outputs import RequestOutput
from octavo.request import FinishReason


@dataclass(slots=True)
class _Stream:
    """What is known of one request's output."""

    request: EngineRequest
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    token_ids: list[int]
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class OutputProcessor:
    """The text of all requests under way."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def add(self, request: EngineRequest) -> None:
        """Expect output for the request, beyond the output_ids it may already have.

        Raises InvalidRequestError where a request of that id is under way.
        """
        if request.request_id in self._streams:
            raise InvalidRequestError(
                f"a request with the id {request.request_id!r} is under way; give each its own",
                param="request_id",
            )
        detokenizer = Detokenizer(self._tokenizer)
        detokenizer.push(request.output_ids)
        self._streams[request.request_id] = _Stream(
            request=request,
            stop_ids=frozenset((*request.eos_ids, *request.params.stop_token_ids)),
            detokenizer=detokenizer,
            token_ids=list(request.output_ids),
        )

    def process(self, outputs: Iterable[EngineOutput]) -> list[RequestOutput]:
        """One RequestOutput for each output, in order; requests that ended are forgotten.

        Output of requests unknown here, such as those aborted a moment ago, is dropped.
        """
        results = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            results.append(_advance(stream, output))
            if output.finish_reason is not None:
                del self._streams[output.request_id]
        return results

    def abort(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._streams.pop(request_id, None)


def _advance(stream: _Stream, output: EngineOutput) -> RequestOutput:
    new_ids = output.new_token_ids
    stream.token_ids.extend(new_ids)
    stream.logprobs.extend(output.logprobs or ())
    stream.cached_tokens = max(stream.cached_tokens, output.num_cached_tokens)
    stopped = output.finish_reason is FinishReason.STOP
    # The token that ended the request may be an ordinary one. It was sampled, so it counts among the
    # ids, but it says "stop", so it is no part of the text.
    shown = new_ids[:-1] if stopped and new_ids and new_ids[-1] in stream.stop_ids else new_ids
    delta = stream.detokenizer.push(shown)
    if output.finish_reason is not None:
        delta += stream.detokenizer.finish()
    return RequestOutput(
        request_id=output.request_id,
        text=stream.detokenizer.text,
        delta=delta,
        token_ids=list(stream.token_ids),
        new_token_ids=list(new_ids),
        prompt_tokens=len(stream.request.prompt_ids),
        cached_tokens=stream.cached_tokens,
        finish_reason=output.finish_reason,
        error=output.error,
        logprobs=list(stream.logprobs),
        seed=stream.request.params.seed,
    )
