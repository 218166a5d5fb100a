"""A small HTTP/1.1 client, so that the load generator is not what is measured.

Rule: bytes go from the socket through the parser to the receiver in one call; no task is woken for a chunk,
only for the end of an answer. That costs a few microseconds where a general client costs a hundred.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from octavo.errors import ConfigError


class Receiver(Protocol):
    """Takes an answer as it comes. Neither method may raise."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The status and the headers, by lower-case name."""

    def body(self, data: bytes) -> None:
        """The next piece of the body."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where it listens and what it wants to see with each request."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """The server at an http or https URL; ConfigError if that is none."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url[:200]!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url[:200]!r} is no URL of a server; give one such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"), api_key)

    def post(self, path: str, body: bytes) -> bytes:
        """The bytes of a request with a JSON body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream, application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "\r\n"]).encode() + body


class HTTPClient:
    """Connections to one server. They are kept open, and each carries one request at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, receiver: Receiver) -> None:
        """Send a request and return when its answer is complete.

        OSError if it never will be: no connection, or one that ends too soon, or speaks no HTTP.
        """
        request = self._target.post(path, body)
        connection = self._take_idle()
        if connection is not None:
            try:
                await self._exchange(connection, request, receiver)
                return
            except ConnectionError:
                if connection.heard:
                    raise
                # The server hung up while the connection was idle: the request was not read.
        await self._exchange(await self._connect(), request, receiver)

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, connection: _Connection, request: bytes, receiver: Receiver) -> None:
        try:
            await connection.exchange(request, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = self._target.host, self._target.port
        _, connection = await loop.create_connection(_Connection, host, port, ssl=self._tls)
        return connection


class _Connection(asyncio.Protocol):
    """One connection. httptools calls the on_... methods from within feed_data."""

    def __init__(self) -> None:
        self.heard = False  # anything at all in answer to the request
        self._open = self._keep_alive = self._has_head = False
        self._transport: asyncio.Transport
        self._receiver: Receiver
        self._done: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether it can carry another request."""
        return self._open and self._keep_alive and not self._transport.is_closing()

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        self._receiver, self.heard, self._has_head = receiver, False, False
        self._headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        if not self._open:
            raise ConnectionResetError("the server closed the connection")
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None

    def close(self) -> None:
        self._open = False
        self._transport.abort()

    # -- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._open = True

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # nobody asked for anything
            self.close()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionAbortedError(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if self._has_head and not self._headers.keys() & {"content-length", "transfer-encoding"}:
            self.on_message_complete()  # the end of the connection is that of the body
        self._fail(ConnectionResetError(f"the connection ended before the answer did{_because(error)}"))

    # -- the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._keep_alive = self._parser.should_keep_alive()  # no longer known when the body has ended
        self._receiver.head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        self._receiver.body(data)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def _because(error: Exception | None) -> str:
    return f": {error}" if error is not None else ""
