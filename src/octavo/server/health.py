"""GET /health and /ready, for whoever restarts and whoever balances load."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine's loop runs, 503 once it has stopped: restart the server then."""
    return _answer(request, "alive", "the engine has stopped; restart the server")


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while requests are taken. The server listens only once the model is loaded."""
    return _answer(request, "ready", "the engine has stopped")


def _answer(request: Request, good: str, bad: str) -> JSONResponse:
    engine = request.app.state.engine
    if engine.alive:
        return JSONResponse({"status": good, "model": engine.info.name, "requests": engine.num_streams})
    return JSONResponse({"status": bad, "model": engine.info.name}, 503)
