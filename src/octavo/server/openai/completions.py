"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.parallel_sampling import merged
from octavo.errors import InvalidRequestError
from octavo.input.input_processor import InputProcessor
from octavo.input.tokenizer import Tokenizer
from octavo.messages import TokenLogprobs
from octavo.outputs import RequestOutput
from octavo.server import sse
from octavo.server.admission import admit
from octavo.server.openai.answers import Usage, check_model, new_head, stream, whole
from octavo.server.openai.error_responses import RESPONSES
from octavo.server.openai.logprobs import LegacyLogprobs, prompt_logprobs
from octavo.server.openai.protocol import CompletionRequest

router = APIRouter()


@router.post("/v1/completions", responses=RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete prompts, whole or as a stream of chunks."""
    engine: AsyncEngine = request.app.state.engine
    check_model(engine, body.model)
    asked = body.prompts()
    admit(request, body.n * len(asked))
    prompts, outputs = _generate(engine, asked, body)
    answer = _Answer(engine, prompts, body)
    if body.stream:
        return sse.EventStream(stream(outputs, (), answer.pieces, answer.usage_chunk))
    return await whole(outputs, request, answer.whole)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and what an echo of it says. The first `unseen` ids are no part of its text."""

    ids: list[int]
    text: str
    unseen: int
    skip_special_tokens: bool

    @classmethod
    def of(cls, inputs: InputProcessor, prompt: str | list[int], body: CompletionRequest) -> _Prompt:
        """Tokenise a prompt. What was sent as text is echoed as it came."""
        tokenizer = inputs.tokenizer
        ids = inputs.encode(prompt, add_special_tokens=body.add_special_tokens)
        if isinstance(prompt, str):
            return cls(ids, prompt, int(tokenizer.adds_bos and body.add_special_tokens), False)
        skip = body.skip_special_tokens
        return cls(ids, tokenizer.decode(ids, skip_special_tokens=skip) if body.echo else "", 0, skip)


def _generate(
    engine: AsyncEngine, asked: list[str | list[int]], body: CompletionRequest
) -> tuple[list[_Prompt], AsyncGenerator[RequestOutput]]:
    """The prompts and, begun for all or for none, their outputs."""
    params = body.sampling_params()
    prompts, streams = [], []
    for index, item in enumerate(asked):
        try:
            prompt = _Prompt.of(engine.inputs, item, body)
            stream_ = engine.generate(
                prompt.ids, params, n=body.n, priority=body.priority, cache_salt=body.cache_salt
            )
        except InvalidRequestError as error:
            if len(asked) == 1 or error.param != "prompt":
                raise
            raise type(error)(f"of prompt[{index}]: {error}", param="prompt") from error
        prompts.append(prompt)
        streams.append(stream_)
    return prompts, streams[0] if len(streams) == 1 else merged(streams, stride=body.n)


class _Answer:
    """One answer in OpenAI's form: choice i * n + j is the j-th of prompt i."""

    def __init__(self, engine: AsyncEngine, prompts: list[_Prompt], body: CompletionRequest) -> None:
        self._include_usage = body.include_usage
        self._head = {"object": "text_completion", **new_head(engine, "cmpl")}
        self._usage = Usage(body.n)
        self._choices = [
            _Choice(engine.inputs.tokenizer, prompt, body) for prompt in prompts for _ in range(body.n)
        ]

    def whole(self, lasts: list[RequestOutput]) -> dict[str, Any]:
        """The answer, of the last output of each choice."""
        for last in lasts:
            self._usage.add(last)
        choices = [self._choices[last.index].whole(last) for last in lasts]
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    def pieces(self, output: RequestOutput) -> list[bytes]:
        """The chunk for what an output adds, if that is anything."""
        if output.finished:
            self._usage.add(output)
        piece = self._choices[output.index].piece(output)
        return [] if piece is None else [self._chunk([piece], None)]

    def usage_chunk(self) -> bytes | None:
        """The last chunk, if it was asked for."""
        return self._chunk([], self._usage.body()) if self._include_usage else None

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        extra = {"usage": usage} if self._include_usage else {}
        return sse.event({**self._head, "choices": choices, **extra})


class _Choice:
    """One completion, behind its prompt where that is echoed."""

    def __init__(self, tokenizer: Tokenizer, prompt: _Prompt, body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._echo = prompt.text if body.echo else ""
        self._echoes_logprobs = body.echo and body.logprobs is not None
        self._count = body.logprobs
        self._prompt_count = body.prompt_logprobs
        self._started = False
        self._logprobs = LegacyLogprobs(
            tokenizer,
            body.logprobs or 0,
            offset=len(self._echo),
            skip_special_tokens=body.skip_special_tokens,
        )

    def whole(self, last: RequestOutput) -> dict[str, Any]:
        """The choice, of its last output."""
        return self._object(last, last.text, last.logprobs, first=True)

    def piece(self, output: RequestOutput) -> dict[str, Any] | None:
        """What an output adds to the choice; None where that is nothing."""
        first, self._started = not self._started, True
        piece = self._object(output, output.delta, output.new_logprobs, first=first)
        says = piece["text"] or output.new_logprobs or output.finished or "prompt_logprobs" in piece
        return piece if says else None

    def _object(
        self, output: RequestOutput, text: str, entries: list[TokenLogprobs], *, first: bool
    ) -> dict[str, Any]:
        value: dict[str, Any] = {
            "index": output.index,
            "text": self._echo + text if first else text,
            "logprobs": None if self._count is None else self._logprobs.piece(entries),
            "finish_reason": output.finish_reason,
        }
        of_prompt = output.prompt_logprobs if first else None
        if of_prompt is not None and self._echoes_logprobs:
            echo = self._echo_logprobs(of_prompt)
            value["logprobs"] = {name: echo[name] + values for name, values in value["logprobs"].items()}
        if of_prompt is not None and self._prompt_count is not None:
            value["prompt_logprobs"] = prompt_logprobs(self._tokenizer, of_prompt, self._prompt_count)
        return value

    def _echo_logprobs(self, of_prompt: list[TokenLogprobs]) -> dict[str, Any]:
        prompt = self._prompt
        legacy = LegacyLogprobs(
            self._tokenizer, self._count or 0, skip_special_tokens=prompt.skip_special_tokens
        )
        return legacy.echo(prompt.ids, of_prompt, unseen=prompt.unseen)
