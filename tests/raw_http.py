"""An app behind the real server in this process, and clients who write what they like.

async with listening(app) as port:
    answer = await exchange(port, b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from octavo.config.server import ServerConfig
from octavo.server.app import create_app
from octavo.server.serving import _Server


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, or what there is of it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error


def app_without_engine(config: ServerConfig | None = None) -> FastAPI:
    """The application as far as it gets without a model."""
    app = create_app(None, config)  # type: ignore[arg-type]
    app.state.engine = SimpleNamespace(requests=SimpleNamespace(settle=lambda *_: None))
    return app


@asynccontextmanager
async def listening(app: FastAPI, config: ServerConfig | None = None) -> AsyncIterator[int]:
    """Serve the app, without its lifespan, on a port of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = _Server(app, config or ServerConfig(), lambda: None, lambda _: None)
        server.config.lifespan = "off"
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        try:
            yield listener.getsockname()[1]
        finally:
            for each in server.servers:
                each.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            if server.server_state.tasks:
                await asyncio.wait(server.server_state.tasks, timeout=5)


def head(path: str = "/", method: str = "GET", host: str = "localhost", **headers: str) -> bytes:
    """A request's head. Underscores in the headers' names stand for dashes."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def exchange(port: int, data: bytes, seconds: float = 10) -> Answer:
    """Send bytes, and read one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(seconds):
            return await read_answer(reader, has_body=not data.startswith(b"HEAD"))
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer:
    """The next answer on a connection; of a stream, its head."""
    start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines if line]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    length = int(headers.get("content-length", "0")) if has_body else 0
    return Answer(int(start.split()[1]), headers, await reader.readexactly(length))


async def read_to_done(reader: asyncio.StreamReader) -> bytes:
    """The rest of a stream of events, with its last."""
    data = b""
    while b"data: [DONE]\n\n" not in data[-40:]:
        piece = await reader.read(1 << 16)
        assert piece, f"the stream broke off after {data[-200:]!r}"
        data += piece
    return data
