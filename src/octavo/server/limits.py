"""Bounds on what a client may send.

Rule: refused before it is read into memory.
"""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.openai.error_responses import error_body

#: Far beyond any context, and few enough to hold many at once.
MAX_BODY_NBYTES = 16 << 20
_REFUSAL = f"the body has more than {MAX_BODY_NBYTES >> 20} MiB; send less"


class BodyLimit:
    """Middleware that answers 413 to bodies above MAX_BODY_NBYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _declared_nbytes(scope) > MAX_BODY_NBYTES:
            body = error_body(_REFUSAL, kind="invalid_request_error", code="body_too_large")
            await JSONResponse(body, 413, headers={"Connection": "close"})(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_NBYTES:  # sent in chunks, so it declared no length
                raise HTTPException(413, _REFUSAL, headers={"Connection": "close"})
            return message

        await self._app(scope, counted, send)


def _declared_nbytes(scope: Scope) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
