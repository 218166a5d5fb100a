"""GET /v1/models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from octavo.errors import ModelNotFoundError
from octavo.server.openai.error_responses import RESPONSES

router = APIRouter()
_STARTED = int(time.time())


@router.get("/v1/models", responses=RESPONSES)
async def list_models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/v1/models/{name:path}", responses=RESPONSES)
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    model = _model(request)
    if name != model["id"]:
        raise ModelNotFoundError(f"model {name!r} is not served here; {model['id']!r} is")
    return model


def _model(request: Request) -> dict[str, Any]:
    info = request.app.state.engine.info
    return {
        "id": info.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "octavo",
        "max_model_len": info.max_model_len,
    }
