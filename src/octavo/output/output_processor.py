"""Makes a `RequestOutput` of what the engine adds to each request: the only writer of text.

Rule: text is a fold over the output ids. A request that resumes begins with the text of the ids it
already has, and goes on as if nothing had happened. A stop string ends a request here, with the token that
completes it; the engine, which knows no text, has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.errors import InvalidRequestError
from octavo.messages import EngineOutput, EngineRequest, TokenLogprobs
from octavo.output.detokenizer import Detokenizer, Vocabulary
from octavo.output.stop import StopChecker
from octavo.outputs import RequestOutput, Transcript
from octavo.request import FinishReason


@dataclass(frozen=True, slots=True)
class Processed:
    """outputs: one for each that the engine gave, in order. stopped: requests among them that a stop string
    ended; the engine goes on with these until they are aborted there."""

    outputs: list[RequestOutput]
    stopped: list[str]


class OutputProcessor:
    """The text of all requests under way."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._streams)

    def add(self, request: EngineRequest) -> None:
        """Expect output for the request, beyond the output_ids it may already have.

        Raises InvalidRequestError where a request of that id is under way, or where a stop string ends the
        text of its output_ids.
        """
        if request.request_id in self._streams:
            raise InvalidRequestError(
                f"a request with the id {request.request_id!r} is under way; give each its own",
                param="request_id",
            )
        stream = _Stream(request, self._tokenizer)
        stream.push(request.output_ids)
        if stream.stopped:
            raise InvalidRequestError(
                f"output_ids has a stop string, with token {stream.num_tokens} of "
                f"{len(request.output_ids)}: the request is complete, resume only what is not",
                param="output_ids",
            )
        self._streams[request.request_id] = stream

    def process(self, outputs: Iterable[EngineOutput]) -> Processed:
        """One RequestOutput for each output, in order; requests that ended are forgotten.

        Output of requests unknown here, such as those aborted or stopped a moment ago, is dropped.
        """
        processed = Processed([], [])
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            result = stream.advance(output)
            processed.outputs.append(result)
            if result.finished:
                del self._streams[output.request_id]
                if output.finish_reason is None:
                    processed.stopped.append(output.request_id)
        return processed

    def abort(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._streams.pop(request_id, None)


class _Stream:
    """What is known of one request's output."""

    def __init__(self, request: EngineRequest, tokenizer: Vocabulary) -> None:
        params = request.params
        self._transcript = Transcript()
        self._request = request
        self._end_ids = frozenset((*request.eos_ids, *params.stop_token_ids))
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(params.stop, include_stop=params.include_stop_str_in_output)
        self._cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those of a resumed request included."""
        return len(self._transcript.token_ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.stopped

    def push(self, ids: Sequence[int], *, ends: bool = False) -> str:
        """Take the next tokens and return the text they add. Tokens behind a stop string are left out.

        ends: the last of them is not text but says that the text ends.
        """
        delta = ""
        for index, token_id in enumerate(ids, start=1):
            self._transcript.token_ids.append(token_id)
            if ends and index == len(ids):
                break
            armed = self.num_tokens >= self._request.params.min_tokens
            delta += self._stops.push(self._detokenizer.push([token_id]), armed=armed)
            if self.stopped:
                break
        self._transcript.pieces.append(delta)
        return delta

    def advance(self, output: EngineOutput) -> RequestOutput:
        """The state after what a step added."""
        transcript, before = self._transcript, self.num_tokens
        self._cached_tokens = max(self._cached_tokens, output.num_cached_tokens)
        reason, ids = output.finish_reason, output.new_token_ids
        # The token that ended the request may be an ordinary one. It was sampled, so it counts among the
        # ids, but it says "stop", so it is no part of the text.
        ends = reason is FinishReason.STOP and bool(ids) and ids[-1] in self._end_ids
        delta = self.push(ids, ends=ends)
        if reason is not None:
            delta += self._flush()
        if self.stopped and output.error is None:
            reason = FinishReason.STOP
        new_ids = transcript.token_ids[before:]
        if self._prompt_logprobs is None:  # of an engine that died and was replaced, the first's count
            self._prompt_logprobs = output.prompt_logprobs
        transcript.logprobs.extend((output.logprobs or [])[: len(new_ids)])
        return RequestOutput(
            request_id=output.request_id,
            delta=delta,
            new_token_ids=new_ids,
            prompt_tokens=len(self._request.prompt_ids),
            num_tokens=len(transcript.token_ids),
            transcript=transcript,
            num_pieces=len(transcript.pieces),
            num_logprobs=len(transcript.logprobs),
            cached_tokens=self._cached_tokens,
            finish_reason=reason,
            error=output.error,
            prompt_logprobs=self._prompt_logprobs,
            seed=self._request.params.seed,
        )

    def _flush(self) -> str:
        """What was held back: nothing will complete it any more."""
        delta = self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        self._transcript.pieces.append(delta)
        return delta
