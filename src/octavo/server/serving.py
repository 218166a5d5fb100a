"""Runs the application on a socket until it is told to stop.

Rule: the first SIGINT or SIGTERM stops in order. From then on /ready says so and new requests are refused,
while open answers get drain_seconds to end; then the engine stops, which ends those still open with an error
that says so, and the socket closes. A second signal of either kind skips the waiting. Clients who don't read
are not waited for. However many signals it took, a server that was told to stop has not failed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.config.server import ServerConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.request_record import log_to
from octavo.errors import ConfigError
from octavo.observability.runtime import settle_garbage_collector
from octavo.platforms.files import allow_open_files
from octavo.server import connection
from octavo.server.admission import Admission

_LAST_WORDS_SECONDS = 2.0  # for errors to reach the clients
_TICK_SECONDS = 0.02
#: As many connections as are open at most, unless --max-connections says more.
_MAX_CONNECTIONS = 4096
#: Files of other kinds: the model's, the engine's sockets, logs.
_OTHER_FILES = 128
#: When a client's machine has vanished: seconds until asked, between questions, and how many.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


def run(
    app: FastAPI,
    listener: socket.socket,
    config: ServerConfig,
    *,
    on_ready: Callable[[], None],
    on_drain: Callable[[float], None],
) -> None:
    """Serve until SIGINT or SIGTERM. ConfigError if another process took the port in the meantime."""
    server = _Server(app, config, on_ready, on_drain)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    _find_vanished_clients(listener)
    try:
        listener.listen()
    except OSError as error:
        raise ConfigError(f"can't listen any more: {error}. Choose another --port") from error
    server.run(sockets=[listener])


def max_connections(config: ServerConfig) -> int:
    """How many may be open, once this process's limit of open files is raised to that. ConfigError where
    that is more than the system allows."""
    wanted = config.max_connections or _MAX_CONNECTIONS
    allowed = allow_open_files(wanted + _OTHER_FILES) - _OTHER_FILES
    if config.max_connections > allowed:
        raise ConfigError(
            f"max_connections is {config.max_connections}, but this process may have "
            f"{allowed + _OTHER_FILES} files open, {_OTHER_FILES} of which it needs itself; lower it to "
            f"{max(allowed, 1)}, or raise `ulimit -n`"
        )
    return max(min(wanted, allowed), 1)


def _find_vanished_clients(listener: socket.socket) -> None:
    """Accepted sockets inherit these."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Server(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        on_ready: Callable[[], None],
        on_drain: Callable[[float], None],
    ) -> None:
        protocol = connection.limited(max_connections(config))
        options: dict[str, Any] = {
            "log_level": "error",  # what clients do wrong is answered, and not for them to fill the log with
            "access_log": False,
            "http": protocol,
            "ws": "none",
            "proxy_headers": False,
            "server_header": False,
            "timeout_keep_alive": connection.KEEP_ALIVE_SECONDS,
            "timeout_graceful_shutdown": 1,  # for what comes in the last moment; the rest is over by then
        }
        super().__init__(uvicorn.Config(app, **options))
        self._state = app.state
        self._drain_seconds = config.drain_seconds
        self._on_ready = on_ready
        self._on_drain = on_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log_to(sys.stderr)
        settle_garbage_collector()
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first stops in order, the second at once."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        admission: Admission = self._state.admission
        admission.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine: AsyncEngine = self._state.engine
        if self.server_state.tasks:
            self._on_drain(self._drain_seconds)
        await self._wait_for_answers(self._drain_seconds, until_forced=True)
        await engine.close()
        await self._wait_for_answers(_LAST_WORDS_SECONDS)
        for each in list(self.server_state.connections):
            each.transport.abort()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn left it out
            await self.lifespan.shutdown()

    async def _wait_for_answers(self, seconds: float, *, until_forced: bool = False) -> None:
        """Until no request is under way, or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.server_state.tasks and loop.time() < deadline:
            if until_forced and self.force_exit:
                return
            await asyncio.sleep(_TICK_SECONDS)
