"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.engine.async_engine import AsyncEngine
from octavo.messages import TokenLogprobs
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server import sse
from octavo.server.admission import admit
from octavo.server.openai.answers import Usage, check_model, new_head, stream, whole
from octavo.server.openai.error_responses import RESPONSES
from octavo.server.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.openai.protocol import ChatCompletionRequest

router = APIRouter()


@router.post("/v1/chat/completions", responses=RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    engine: AsyncEngine = request.app.state.engine
    check_model(engine, body.model)
    admit(request, body.n)
    answer = _Answer(engine, body)
    outputs = engine.chat(
        body.messages,
        body.sampling_params(),
        n=body.n,
        priority=body.priority,
        cache_salt=body.cache_salt,
        **body.chat_arguments(),
    )
    if body.stream:
        return sse.EventStream(stream(outputs, answer.roles(), answer.pieces, answer.usage_chunk))
    return await whole(outputs, request, answer.whole)


class _Answer:
    """One answer in OpenAI's form."""

    def __init__(self, engine: AsyncEngine, body: ChatCompletionRequest) -> None:
        self._tokenizer = engine.inputs.tokenizer
        self._n = body.n
        self._include_usage = body.include_usage
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._head = new_head(engine, "chatcmpl")
        self._usage = Usage(body.n)
        self._prompt_logprobs_due = body.prompt_logprobs is not None

    def whole(self, lasts: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for last in lasts:
            self._usage.add(last)
            choices.append(
                {
                    "index": last.index,
                    "message": {"role": "assistant", "content": last.text},
                    "logprobs": self._chat_logprobs(last.logprobs),
                    "finish_reason": last.finish_reason,
                }
            )
        body = {"object": "chat.completion", **self._head, "choices": choices, "usage": self._usage.body()}
        return body | self._of_prompt(lasts[0])

    def roles(self) -> list[bytes]:
        """The first chunk of each choice."""
        return [self._chunk(i, {"role": "assistant", "content": ""}, None, None) for i in range(self._n)]

    def pieces(self, output: RequestOutput) -> list[bytes]:
        """Chunks for what an output adds."""
        pieces = []
        logprobs = self._chat_logprobs(output.new_logprobs) if self._logprobs else None
        of_prompt = self._of_prompt(output) if self._prompt_logprobs_due else {}
        self._prompt_logprobs_due &= not of_prompt
        if output.delta or logprobs or of_prompt:
            pieces.append(self._chunk(output.index, {"content": output.delta}, logprobs, None, of_prompt))
        if output.finished:
            self._usage.add(output)
            pieces.append(self._chunk(output.index, {}, None, output.finish_reason))
        return pieces

    def usage_chunk(self) -> bytes | None:
        """The last chunk, if it was asked for."""
        return sse.event(self._body([], self._usage.body())) if self._include_usage else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None,
        reason: FinishReason | None,
        of_prompt: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse.event(self._body([choice], None) | (of_prompt or {}))

    def _body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body: dict[str, Any] = {"object": "chat.completion.chunk", **self._head, "choices": choices}
        if self._include_usage:
            body["usage"] = usage
        return body

    def _chat_logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, entries) if self._logprobs else None

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        if self._prompt_logprobs is None or output.prompt_logprobs is None:
            return {}
        values = prompt_logprobs(self._tokenizer, output.prompt_logprobs, self._prompt_logprobs)
        return {"prompt_logprobs": values}
