"""GET /metrics, for Prometheus; and the middleware that tells the engine's log where requests come from.

Rule: what belongs to the engine is asked of it at each scrape; a hung engine costs the scrape its numbers,
not its answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.request_log import Origin, origin
from octavo.errors import EngineDeadError
from octavo.observability.prometheus import Exposition, Snapshot
from octavo.observability.runtime import GCWatch, LoopWatch
from octavo.observability.stats import EngineStats
from octavo.server.peers import PERIOD_SECONDS, FrontStats, Peers
from octavo.server.version import build_labels

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything that is counted and measured; docs/metrics.md lists it."""
    body, content_type = await request.app.state.metrics.scrape(request.headers.get("accept", ""))
    return Response(body, media_type=content_type)


class Metrics:
    """What /metrics tells of one engine's server. Lives in the loop it is made in, until `close`.

    peers: other front ends of the same engine, whose requests are counted with this one's.
    """

    def __init__(self, engine: AsyncEngine, peers: Peers | None = None) -> None:
        self._engine = engine
        self._peers = peers
        self._build = build_labels(engine.info)
        self._exposition = Exposition(os.getpid())
        self._gc = GCWatch()
        self._loop = LoopWatch()
        self._telling = asyncio.create_task(self._tell())

    def close(self) -> None:
        """Measure no more."""
        self._telling.cancel()
        if self._peers is not None:
            self._peers.tell(self._front())
        self._gc.close()
        self._loop.close()

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """A body and its content type."""
        # The server's numbers first, and without a pause in between: a request is open here for longer than
        # it is in the engine, so that none open means none there.
        front = self._front()
        if self._peers is not None:
            front = self._peers.together(front)
        snapshot = Snapshot(
            build=self._build,
            server=front.server,
            engine=await self._ask_engine(),
            gc_pauses=front.gc_pauses,
            loop_lag=front.loop_lag,
            sizes=front.sizes,
        )
        return self._exposition.render(snapshot, accept)

    def _front(self) -> FrontStats:
        return FrontStats(
            server=self._engine.requests.stats(),
            gc_pauses=self._gc.snapshot(),
            loop_lag=self._loop.snapshot(),
            sizes=self._engine.sizes(),
        )

    async def _tell(self) -> None:
        while self._peers is not None:
            self._peers.tell(self._front())
            await asyncio.sleep(PERIOD_SECONDS)

    async def _ask_engine(self) -> EngineStats | None:
        try:
            return await asyncio.to_thread(self._engine.stats)
        except EngineDeadError:
            return None


class RequestOrigins:
    """Middleware: gives each POST under /v1/ an origin, and tells the log when it is over.

    The outermost, so that what other middleware refuses is counted too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        source = Origin(endpoint=scope["path"], arrival=time.monotonic())
        status, error = 0, None

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        token: Any = origin.set(source)
        try:
            await self._app(scope, receive, watched)
        except Exception as cause:
            error = f"{type(cause).__name__}: {cause}"
            raise
        finally:
            origin.reset(token)
            engine: AsyncEngine = scope["app"].state.engine
            engine.requests.settle(source, status, error)
