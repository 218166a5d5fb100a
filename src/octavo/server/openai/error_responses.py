"""Errors as OpenAI's clients expect them.

Rule: a 4xx says what to change and names the field; a 5xx is ours and says so.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from octavo.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, OctavoError

_MAX_MESSAGE = 2000
_MAX_PARAM = 100


#: HTTP's own refusals.
_HTTP_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    503: "busy",
}


class ErrorDetail(BaseModel):
    """What went wrong, in words and for programs. param: the field that is to blame, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


#: What a route of OpenAI's may answer beside success, for its schema.
RESPONSES: dict[int | str, dict[str, Any]] = {kind: {"model": ErrorResponse} for kind in ("4XX", "5XX")}
_SHOWN = 100


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    param = None if param is None else _printable(param, _MAX_PARAM)
    return {
        "error": {"message": _printable(message, _MAX_MESSAGE), "type": kind, "param": param, "code": code}
    }


def _printable(text: str, length: int) -> str:
    """A text that may quote the caller, cut short, and without the lone surrogates that JSON can carry."""
    return text[:length].encode(errors="backslashreplace").decode()


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
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        body = error_body(message, kind=kind, code=_HTTP_CODES.get(error.status_code))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)  # a bug; the server's log has the traceback
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        message = f"the server failed on this request ({type(error).__name__}); its log says more"
        return JSONResponse(error_body(message, kind="server_error", code="internal_error"), 500)


def _validation_body(error: RequestValidationError) -> dict[str, Any]:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(path)[:_MAX_PARAM] or None
    if first["type"] == "extra_forbidden":
        message = f"unknown field {param!r}; it would have no effect here, so remove it"
    elif not path and first["type"] in ("model_attributes_type", "missing"):
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    elif first["type"] == "json_invalid":
        problem = first.get("ctx", {}).get("error", first["msg"])
        message, param = f"the body is no JSON: {problem}, at character {first['loc'][-1]}", None
    elif first["type"] in ("greater_than_equal", "less_than_equal"):
        message = f"{param} is {str(first['input'])[:_SHOWN]}: {first['msg']}"
    else:
        message = f"{param or 'body'}: {first['msg']}"
    return error_body(message, kind="invalid_request_error", param=param, code="invalid_request")
