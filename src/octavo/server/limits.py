"""Bounds on what a client may send.

Rule: refused before it is read into memory. Those on a connection, and on a head that never ends, are in
`connection`; these are for requests whose head is complete.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

#: Far beyond any context, and few enough to hold many at once.
MAX_BODY_NBYTES = 16 << 20
#: Bodies of all requests under way.
MAX_BODIES_NBYTES = 256 << 20
#: How long a body may take to arrive.
BODY_SECONDS = 60.0
MAX_TARGET_NBYTES = 8 << 10
MAX_HEADERS = 100
MAX_HEADERS_NBYTES = 32 << 10

BODY_TOO_LARGE = f"the body has more than {MAX_BODY_NBYTES >> 20} MiB; send less"
_CLOSE = {"Connection": "close"}


class Bodies:
    """What bodies of requests under way take together."""

    def __init__(self) -> None:
        self.num_bytes = 0


class Body:
    """One request's body: `receive` is ASGI's, within the bounds."""

    def __init__(self, receive: Receive, bodies: Bodies) -> None:
        self._receive = receive
        self._bodies = bodies
        self._num_bytes = 0
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive(self) -> Message:
        """The next message. HTTPException where a bound is passed."""
        if self._complete:  # what comes now is the client's departure
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body took more than {BODY_SECONDS:g} s to arrive", headers=_CLOSE
            ) from None
        self._complete = not message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        return message

    def release(self) -> None:
        """The request has ended."""
        self._bodies.num_bytes -= self._num_bytes

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes
        if self._num_bytes > MAX_BODY_NBYTES:  # sent in chunks, so it declared no length
            raise HTTPException(413, BODY_TOO_LARGE, headers=_CLOSE)
        if self._bodies.num_bytes > MAX_BODIES_NBYTES:
            raise HTTPException(
                503,
                f"the requests under way have more than {MAX_BODIES_NBYTES >> 20} MiB together; try again",
                headers=_CLOSE | {"Retry-After": "1"},
            )
