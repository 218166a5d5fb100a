"""Errors as OpenAI's clients expect them.

Rule: a 4xx says what to change and names the field; a 5xx is ours and says so.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from octavo.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, OctavoError

_MAX_MESSAGE = 2000


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of one of our errors."""
    match error:
        case InvalidRequestError():
            body = error_body(str(error), kind="invalid_request_error", param=error.param, code=error.code)
            return 400, body
        case ModelNotFoundError():
            return 404, error_body(
                str(error), kind="invalid_request_error", param="model", code="model_not_found"
            )
        case EngineDeadError():
            return 503, error_body(str(error), kind="server_error", code="engine_dead")
        case _:
            return 500, error_body(str(error), kind="server_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Answer every error of the app in this form."""

    @app.exception_handler(OctavoError)
    async def _ours(request: Request, error: OctavoError) -> JSONResponse:
        status, body = describe(error)
        return JSONResponse(body, status)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_validation_body(error), 400)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        body = error_body(str(error.detail), kind="invalid_request_error", code=None)
        return JSONResponse(body, error.status_code, headers=error.headers)


def _validation_body(error: RequestValidationError) -> dict[str, Any]:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        message = f"unknown field {param!r}; it would have no effect here, so remove it"
    elif first["type"] == "json_invalid":
        message, param = f"the body is no JSON: {first['msg']}", None
    else:
        message = f"{param or 'body'}: {first['msg']}"
    return error_body(message, kind="invalid_request_error", param=param, code="invalid_request")
