"""The HTTP application: routes over one engine.

Rule: the server knows the engine and the nouns. What a request means is decided behind them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import octavo
from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.async_engine import AsyncEngine, LoadedEngine
from octavo.errors import QueueFullError
from octavo.server import console, health, metrics, version
from octavo.server.admission import Admission
from octavo.server.auth import load_keys
from octavo.server.gate import Gate
from octavo.server.hosts import Hosts
from octavo.server.metrics import Metrics, RequestOrigins
from octavo.server.openai import chat, completions, error_responses, models, tokenization


def create_app(
    engine: LoadedEngine,
    server_config: ServerConfig | None = None,
    engine_config: EngineConfig | None = None,
    *,
    host: str = "127.0.0.1",
) -> FastAPI:
    """The app that serves a loaded engine; it owns the engine and closes it at shutdown.

    host: where it listens. Configs that are not given are the defaults.
    """
    config = server_config or ServerConfig()
    capacity = config.capacity(engine_config or EngineConfig())

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
    app.state.admission = Admission(capacity)
    app.add_middleware(
        Gate,
        admission=app.state.admission,
        keys=load_keys(config.api_key, config.api_key_file),
        hosts=Hosts(host, config.allowed_hosts),
    )
    app.add_middleware(RequestOrigins)  # the last one added is the outermost
    error_responses.install(app)
    app.add_exception_handler(QueueFullError, _queue_full)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(version.router)
    app.include_router(models.router)
    app.include_router(chat.router)
    app.include_router(completions.router)
    app.include_router(tokenization.router)
    app.include_router(console.router)
    return app


async def _queue_full(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, QueueFullError), error
    body = error_responses.error_body(str(error), kind="rate_limit_error", code="queue_full")
    return JSONResponse(body, 429, headers={"Retry-After": str(error.retry_after)})
