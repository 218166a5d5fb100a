"""What answers of chat and completions have in common: who waits for them, and how many tokens they took.

Rule: an answer nobody waits for is aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ModelNotFoundError, OctavoError
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server import sse
from octavo.server.openai.error_responses import describe, error_body

_CLIENT_GONE = 499  # nginx's name for it; nobody reads this answer


def check_model(engine: AsyncEngine, model: str | None) -> None:
    """Raise ModelNotFoundError if a request asks for a model that is not served."""
    if model not in (None, engine.info.name):
        raise ModelNotFoundError(f"model {model!r} is not served here; {engine.info.name!r} is")


def new_head(engine: AsyncEngine, prefix: str) -> dict[str, Any]:
    """What every object of an answer begins with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": engine.info.name,
        "system_fingerprint": engine.info.fingerprint,
    }


class Usage:
    """Tokens of all answers to a request; prompts count once each, whatever n is.

    n: answers to each prompt, of which those with index i * n to (i + 1) * n are the i-th prompt's.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt = self._cached = self._completion = 0

    def add(self, last: RequestOutput) -> None:
        """Count an answer, when it has ended."""
        self._completion += last.num_tokens
        if last.index % self._n == 0:
            self._prompt += last.prompt_tokens
            self._cached += last.cached_tokens

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


async def whole(
    outputs: AsyncGenerator[RequestOutput],
    request: Request,
    body: Callable[[list[RequestOutput]], dict[str, Any]],
) -> Response:
    """The response that `body` makes of the last output of each answer, in their order."""
    answer = asyncio.create_task(_last_outputs(outputs))
    departure = asyncio.create_task(_wait_for_departure(request))
    try:
        await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=_CLIENT_GONE)
        lasts = answer.result()
    finally:
        for task in (answer, departure):
            task.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)
    failed = next((last for last in lasts if last.finish_reason is FinishReason.ERROR), None)
    return JSONResponse(body(lasts)) if failed is None else JSONResponse(failure(failed), 500)


async def stream(
    outputs: AsyncGenerator[RequestOutput],
    first: Iterable[bytes],
    pieces: Callable[[RequestOutput], list[bytes]],
    last: Callable[[], bytes | None],
) -> AsyncGenerator[bytes]:
    """Events: `first`, then `pieces` of each output, then `last`."""
    for event in first:
        yield event
    try:
        async with aclosing(outputs) as open_outputs:
            async for output in open_outputs:
                if output.finish_reason is FinishReason.ERROR:
                    yield sse.event(failure(output))
                    continue
                if events := pieces(output):
                    yield b"".join(events)  # each send costs more than all else that is done for a token
        ending = last()
        if ending is not None:
            yield ending
    except OctavoError as error:  # the engine died: the status line is long gone
        yield sse.event(describe(error)[1])
    yield sse.DONE


def failure(output: RequestOutput) -> dict[str, Any]:
    """The error of an answer that could not be computed."""
    return error_body(output.error or "", kind="server_error", code="request_failed")


async def _last_outputs(outputs: AsyncGenerator[RequestOutput]) -> list[RequestOutput]:
    lasts: dict[int, RequestOutput] = {}
    async with aclosing(outputs) as open_outputs:
        async for output in open_outputs:
            lasts[output.index] = output
    assert lasts, "a request ends with an output"
    return [lasts[index] for index in sorted(lasts)]


async def _wait_for_departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
