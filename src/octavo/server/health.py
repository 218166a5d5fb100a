"""GET /health and /ready, for whoever restarts and whoever balances load."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine runs and gets on; 503, with the reason, when it has ended, is being restarted, or
    has not run for a while."""
    return _answer(request, "alive")


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while requests are taken. The server listens only once the model is loaded."""
    return _answer(request, "ready")


def _answer(request: Request, good: str) -> JSONResponse:
    engine = request.app.state.engine
    trouble = engine.trouble
    body = {"status": trouble or good, "model": engine.info.name, "requests": engine.num_streams}
    return JSONResponse(body, 503 if trouble else 200)
