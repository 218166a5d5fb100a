"""Server-sent events (WHATWG HTML, 9.2): one `data:` line for each event."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """An event whose data is `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A response of events. When the client leaves, `events` is closed at once, not when collected."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
