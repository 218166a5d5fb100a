"""The end-of-request record, and the reasons for which requests are refused.

Rule: one line of JSON for each request, whatever became of it, on the logger `octavo.requests` at INFO.
"""

from __future__ import annotations

import logging
from typing import TextIO

import msgspec

from octavo.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger("octavo.requests")

#: Why a request was refused: the engine's reasons, and those of HTTP by status.
HTTP_REASONS = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "body_too_large",
    414: "head_too_large",
    421: "unknown_host",
    422: "invalid_request",
    429: "overloaded",
    431: "head_too_large",
    499: "client_gone",
    503: "unavailable",
}
REFUSALS = tuple(dict.fromkeys((*HTTP_REASONS.values(), "context_length_exceeded", "engine_dead", "other")))
_MAX_ERROR = 500
_MAX_ENDPOINT = 100


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request, as it is logged.

    reason: a FinishReason, or refused; refusal says why. Milliseconds are of the monotonic clock: queue,
    prefill and decode in the engine, ttft and e2e as the caller saw them. completion_tokens: what the caller
    got; generated_tokens: what the engine made, a few more where a stop string or the caller ended it.
    """

    event: str = "request_end"
    id: str | None = None
    endpoint: str
    model: str
    reason: str
    refusal: str | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    error: str | None = None


def write(record: RequestRecord) -> None:
    """Log a record."""
    if logger.isEnabledFor(logging.INFO):
        safe = msgspec.structs.replace(
            record,
            endpoint=printable(record.endpoint, _MAX_ENDPOINT),
            model=printable(record.model),
            error=None if record.error is None else printable(record.error, _MAX_ERROR),
        )
        logger.info("%s", msgspec.json.encode(safe).decode())


def printable(text: str, length: int | None = None) -> str:
    """A text that may quote a caller or name a file, cut short, and without lone surrogates, which UTF-8
    does not know."""
    return text[:length].encode(errors="backslashreplace").decode()


def log_to(stream: TextIO) -> None:
    """Let records go to a stream, each on a line of its own, and nowhere else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def milliseconds(seconds: float | None) -> float | None:
    """As records give them: to the microsecond; None as it is."""
    return None if seconds is None else round(seconds * 1e3, 3)


def reason_of(error: Exception) -> str:
    """The name of an error that refuses a request."""
    match error:
        case InvalidRequestError():
            return error.code if error.code in REFUSALS else "invalid_request"
        case EngineDeadError():
            return "engine_dead"
        case _:
            return "other"
