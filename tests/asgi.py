"""A client of an application in this process that sees each piece as it is sent, and may leave.

    answer = await post(app, "/v1/chat/completions", {...}, leave_after=64)

httpx's ASGI transport gives a body only when it is complete, which hides when its first token came.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI


@dataclass
class Answer:
    """What a client saw. status: 0 if it left before an answer began. Times: seconds of the monotonic
    clock; token_times: when each token's piece of a stream came, where logprobs were asked for."""

    began: float = 0.0
    status: int = 0
    body: bytes = b""
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        events = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [json.loads(event) for event in events if event != "[DONE]"]

    def json(self) -> Any:
        """The body of an answer that is no stream."""
        return json.loads(self.body)


async def post(
    app: FastAPI,
    path: str,
    body: object,
    *,
    leave_after: int | None = None,
    leave_at: asyncio.Event | None = None,
) -> Answer:
    """POST JSON, or bytes as they are. Leave once so many bytes of the body came, or at an event."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer, gone = Answer(), leave_at or asyncio.Event()
    requests = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive() -> MutableMapping[str, Any]:
        message = next(requests, None)
        if message is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        elif message.get("body"):
            answer.body += message["body"]
            if b'"logprobs":{' in message["body"]:
                answer.token_times.append(time.monotonic())
        if leave_after is not None and len(answer.body) >= leave_after:
            gone.set()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(raw)).encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    answer.began = time.monotonic()
    await app(scope, receive, send)
    answer.ended = time.monotonic()
    return answer
