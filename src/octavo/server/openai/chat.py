"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ModelNotFoundError, OctavoError
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server import sse
from octavo.server.admission import admit
from octavo.server.openai.error_responses import describe, error_body
from octavo.server.openai.protocol import ChatCompletionRequest

router = APIRouter()
_CLIENT_GONE = 499  # nginx's name for it; nobody reads this answer


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    engine: AsyncEngine = request.app.state.engine
    if body.model not in (None, engine.info.name):
        raise ModelNotFoundError(f"model {body.model!r} is not served here; {engine.info.name!r} is")
    admit(request)
    completion = _Completion(engine, body)
    outputs = engine.chat(
        body.messages, body.sampling_params(), priority=body.priority, **body.chat_arguments()
    )
    if body.stream:
        return sse.EventStream(completion.stream(outputs))
    last = await _last_output(outputs, request)
    return completion.whole(last) if last is not None else Response(status_code=_CLIENT_GONE)


async def _last_output(outputs: AsyncGenerator[RequestOutput], request: Request) -> RequestOutput | None:
    """The last output; None, and the request is aborted, if the client does not wait for it."""
    answer = asyncio.create_task(_last(outputs))
    departure = asyncio.create_task(_wait_for_departure(request))
    try:
        await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        for task in (answer, departure):
            task.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    last = None
    async with aclosing(outputs) as stream:
        async for output in stream:
            last = output
    assert last is not None, "a request ends with an output"
    return last


async def _wait_for_departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Completion:
    """One answer in OpenAI's form."""

    def __init__(self, engine: AsyncEngine, body: ChatCompletionRequest) -> None:
        self._engine = engine
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._logprobs = body.logprobs
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": engine.info.name,
        }

    def whole(self, last: RequestOutput) -> Response:
        if last.finish_reason is FinishReason.ERROR:
            return JSONResponse(error_body(last.error or "", kind="server_error", code="request_failed"), 500)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": last.text},
            "logprobs": self._logprob_content(last, last.token_ids) if self._logprobs else None,
            "finish_reason": last.finish_reason,
        }
        body = {"object": "chat.completion", **self._head, "choices": [choice], "usage": _usage(last)}
        return JSONResponse(body)

    async def stream(self, outputs: AsyncGenerator[RequestOutput]) -> AsyncGenerator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""}, None, None)
        try:
            async with aclosing(outputs) as stream:
                async for output in stream:
                    for piece in self._pieces(output):
                        yield piece
        except OctavoError as error:  # the engine died: the status line is long gone
            yield sse.event(describe(error)[1])
        yield sse.DONE

    def _pieces(self, output: RequestOutput) -> list[bytes]:
        if output.finish_reason is FinishReason.ERROR:
            return [sse.event(error_body(output.error or "", kind="server_error", code="request_failed"))]
        pieces = []
        logprobs = self._logprob_content(output, output.new_token_ids) if self._logprobs else None
        if output.delta or logprobs:
            pieces.append(self._chunk({"content": output.delta}, logprobs, None))
        if output.finished:
            pieces.append(self._chunk({}, None, output.finish_reason))
            if self._include_usage:
                pieces.append(sse.event(self._body([], _usage(output))))
        return pieces

    def _chunk(
        self, delta: dict[str, str], logprobs: dict[str, Any] | None, reason: FinishReason | None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse.event(self._body([choice], None))

    def _body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body: dict[str, Any] = {"object": "chat.completion.chunk", **self._head, "choices": choices}
        if self._include_usage:
            body["usage"] = usage
        return body

    def _logprob_content(self, output: RequestOutput, token_ids: list[int]) -> dict[str, Any] | None:
        if not token_ids:
            return None
        content = []
        for entry in output.logprobs[-len(token_ids) :]:
            top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
            content.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._engine.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _usage(output: RequestOutput) -> dict[str, Any]:
    completion = len(output.token_ids)
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": output.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
    }
