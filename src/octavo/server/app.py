"""The HTTP application: routes over one engine.

Rule: the server knows the engine and the nouns. What a request means is decided behind them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import octavo
from octavo.engine.async_engine import AsyncEngine, LoadedEngine
from octavo.server import console, health, metrics, version
from octavo.server.limits import BodyLimit
from octavo.server.metrics import Metrics, RequestOrigins
from octavo.server.openai import chat, completions, error_responses, models, tokenization


def create_app(engine: LoadedEngine) -> FastAPI:
    """The app that serves a loaded engine; it owns the engine and closes it at shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.engine = AsyncEngine(engine)
        app.state.metrics = Metrics(app.state.engine, getattr(app.state, "peers", None))
        try:
            yield
        finally:
            app.state.metrics.close()
            await app.state.engine.close()

    # FastAPI's documentation pages load scripts from other hosts; /openapi.json is there for tools.
    app = FastAPI(
        title="Octavo", version=octavo.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestOrigins)  # the last one added is the outermost
    error_responses.install(app)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(version.router)
    app.include_router(models.router)
    app.include_router(chat.router)
    app.include_router(completions.router)
    app.include_router(tokenization.router)
    app.include_router(console.router)
    return app
