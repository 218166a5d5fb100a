"""Runs the application on a socket until it is told to stop.

Rule: the first SIGINT or SIGTERM stops in order. No new connections; open answers get DRAIN_SECONDS to
end; then the engine stops, which ends those still open with an error that says so. A second SIGINT stops
the engine at once. Clients who don't read are not waited for.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.request_record import log_to
from octavo.errors import ConfigError
from octavo.observability.runtime import settle_garbage_collector

DRAIN_SECONDS = 5
_LAST_WORDS_SECONDS = 2  # for errors to reach the clients


def run(
    app: FastAPI,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    on_drain: Callable[[float], None],
) -> None:
    """Serve until SIGINT or SIGTERM. ConfigError if another process took the port in the meantime."""
    server = _Server(app, on_ready, on_drain)

    # uvicorn raises a signal again once it has stopped; the orderly end it caused is a success.
    def stop(*_: Any) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        listener.listen()
    except OSError as error:
        raise ConfigError(f"can't listen any more: {error}. Choose another --port") from error
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, app: FastAPI, on_ready: Callable[[], None], on_drain: Callable[[float], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning"))
        self._state = app.state
        self._on_ready = on_ready
        self._on_drain = on_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log_to(sys.stderr)
        settle_garbage_collector()
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine: AsyncEngine = self._state.engine
        if engine.num_streams:
            self._on_drain(DRAIN_SECONDS)
        patience = asyncio.create_task(self._lose_patience(engine))
        try:
            await super().shutdown(sockets)  # waits for connections to end, unless a second SIGINT comes
        finally:
            patience.cancel()
        if self.force_exit:
            await self._end_streams(engine)
            await self.lifespan.shutdown()

    async def _lose_patience(self, engine: AsyncEngine) -> None:
        await asyncio.sleep(DRAIN_SECONDS)
        await self._end_streams(engine)

    async def _end_streams(self, engine: AsyncEngine) -> None:
        await engine.close()
        tasks = self.server_state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
