"""One client's connection: uvicorn's HTTP protocol, with bounds on clients who hold it and do nothing.

Rule: whoever doesn't move is dropped. A head has HEAD_SECONDS to arrive, an idle connection has
KEEP_ALIVE_SECONDS for its next request, and a client who reads too little of its answer STALL_SECONDS to read
on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.openai.error_responses import error_body

#: From the connection's or the head's first byte to the head's last.
HEAD_SECONDS = 15.0
#: Longer than the idle timeouts of usual load balancers, which else race with ours.
KEEP_ALIVE_SECONDS = 75
#: The transport holds 64 KiB for a client and waits for it to read most of that.
STALL_SECONDS = 30.0
#: A head that is incomplete; what a complete one may have is in `limits`.
MAX_HEAD_NBYTES = 64 << 10
#: How long one connection too many is kept for its request, so as to answer it.
_TURN_AWAY_SECONDS = 1.0
#: Requests that a client may send ahead of their turn.
_MAX_AHEAD = 64
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_REASONS |= {503: b"Service Unavailable"}


class Connection(HttpToolsProtocol):
    """A connection. `limited` gives the class that counts them."""

    max_connections: ClassVar[int] = 4096

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._one_too_many = False
        self._head_timer: asyncio.TimerHandle | None = None  # runs while a head is awaited
        self._in_head = True
        self._head_nbytes = 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()  # the one being answered is the first

    # -- asyncio's callbacks ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        if len(self.connections) < self.max_connections:
            super().connection_made(transport)
            self._await_head(HEAD_SECONDS)
            return
        self._one_too_many = True
        self.transport = transport
        self._await_head(_TURN_AWAY_SECONDS)

    def data_received(self, data: bytes) -> None:
        """The client sent something."""
        if self._one_too_many:
            self._head_late()
            return
        super().data_received(data)
        if self._in_head:
            self._head_nbytes += len(data)
            if self._head_nbytes > MAX_HEAD_NBYTES:
                message = f"the request's head has more than {MAX_HEAD_NBYTES} bytes; send fewer"
                self._refuse(431, "headers_too_large", message)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        """It has read most of it."""
        self._stall_timer = _cancelled(self._stall_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was dropped."""
        self._head_timer = _cancelled(self._head_timer)
        self._stall_timer = _cancelled(self._stall_timer)
        for cycle in self._unanswered:  # uvicorn tells only the last
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    # -- the parser's callbacks ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_nbytes = 0
        if self._head_timer is None:
            self._await_head(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        """It has ended."""
        self._in_head = False
        self._head_timer = _cancelled(self._head_timer)
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if len(self._unanswered) > 1:  # read on, as nobody else would notice that the client has gone
            self.flow.resume_reading()
        if len(self._unanswered) > _MAX_AHEAD:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What was sent is not HTTP."""
        self._refuse(400, "invalid_http", msg)

    # -- uvicorn's callbacks ---------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """An answer was written, if not yet read."""
        cycle = self._unanswered.popleft()
        super().on_response_complete()
        if cycle.more_body and self._head_timer is None:  # refused unread: the rest may never come
            self._await_head(HEAD_SECONDS)
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        if self.transport.get_write_buffer_size():  # it has not even read its answer
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    # --------------------------------------------------------------------------------------------------

    def _await_head(self, seconds: float) -> None:
        self._head_timer = self.loop.call_later(seconds, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = _cancelled(self._head_timer)
        if self._one_too_many:
            message = f"the server has {self.max_connections} connections open and takes no more; try again"
            self._refuse(503, "too_many_connections", message)
        elif self._unanswered:  # a head ahead of its turn
            self._await_head(HEAD_SECONDS)
        else:
            self._refuse(408, "request_timeout", f"the request's head took more than {HEAD_SECONDS:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer without troubling the application, and close."""
        self._head_timer = _cancelled(self._head_timer)
        if self.transport.is_closing():
            return
        if self._unanswered:  # in the middle of another answer
            self.transport.abort()
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = msgspec.json.encode(error_body(message, kind=kind, code=code))
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\n%scontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, _REASONS[status], retry, len(body), body)
        )
        self.transport.close()

    def _abort_later(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)


def limited(max_connections: int) -> type[Connection]:
    """The class of a server's connections, of which so many may be open."""
    return type("Connection", (Connection,), {"max_connections": max_connections})


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer, where there may have been one."""
    if timer is not None:
        timer.cancel()
    return None
