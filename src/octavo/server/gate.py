"""What every request passes before a route sees it.

Rule: one look at the head decides, in this order: its size, the Host, the key, whether the server is about
to stop, the length of the body. The gate touches no answer: streams cost what they cost without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server import limits
from octavo.server.admission import Admission, Ticket
from octavo.server.auth import Keys
from octavo.server.hosts import Hosts, host_name
from octavo.server.openai.error_responses import error_body

_CLOSE = {"Connection": "close"}
#: A server that stops is not the one to ask again; another, or the next, is.
_DRAIN_RETRY = "5"
_SAFE = ("GET", "HEAD")


@dataclass(slots=True)
class _Head:
    """What the gate wants to know of a request's headers."""

    num_bytes: int = 0
    hosts: int = 0
    host: bytes = b""
    authorizations: int = 0
    authorization: bytes | None = None
    content_length: int = 0


class Gate:
    """Middleware in front of every route."""

    def __init__(self, app: ASGIApp, *, admission: Admission, keys: Keys, hosts: Hosts) -> None:
        self._app = app
        self._admission = admission
        self._keys = keys
        self._hosts = hosts
        self._bodies = limits.Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or say why not."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = limits.Body(receive, self._bodies)
        ticket = Ticket(self._admission)
        ticket.put_into(scope)
        try:
            await self._app(scope, body.receive, send)
        finally:
            ticket.give_back()
            body.release()

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that is not let in."""
        if scope["type"] != "http":
            return _refuse(501, "not_supported", "only HTTP is served here, no WebSocket")
        head = _read(scope["headers"])
        return (
            _check_size(scope, head)
            or self._check_host(scope, head)
            or self._check_key(scope, head)
            or self._check_draining(scope)
            or _check_length(head)
        )

    def _check_host(self, scope: Scope, head: _Head) -> JSONResponse | None:
        if head.hosts == 0 and scope["http_version"] == "1.0":
            return None  # load balancers' checks; a browser always sends one
        name = host_name(head.host) if head.hosts == 1 else None
        if name is None:
            return _refuse(400, "invalid_host", "the request must have one Host header: the server's name")
        if self._hosts.accepts(name):
            return None
        message = (
            f"this server does not go by the name {name[:200]!r}, which another site could have made up to "
            f"read it through a browser; if it is yours, start the server with --allowed-hosts {name[:200]}"
        )
        return _refuse(421, "unknown_host", message)

    def _check_key(self, scope: Scope, head: _Head) -> JSONResponse | None:
        authorization = head.authorization if head.authorizations == 1 else None
        if self._keys.let_in(scope["path"], authorization):
            return None
        message = (
            "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            if head.authorizations < 2
            else "the request has several Authorization headers; send one"
        )
        headers = {"WWW-Authenticate": 'Bearer realm="octavo"'}
        return _refuse(401, "invalid_api_key", message, headers)

    def _check_draining(self, scope: Scope) -> JSONResponse | None:
        if not self._admission.draining:
            return None
        if scope["path"] == "/ready":
            return JSONResponse({"status": "draining"}, 503)
        if scope["method"] in _SAFE:
            return None
        message = "the server is stopping and takes no new requests; ask another, or try again later"
        return _refuse(503, "draining", message, _CLOSE | {"Retry-After": _DRAIN_RETRY})


def _read(headers: list[tuple[bytes, bytes]]) -> _Head:
    """One pass over the headers; their names are in lower case."""
    head = _Head()
    for name, value in headers:
        head.num_bytes += len(name) + len(value)
        if name == b"host":
            head.hosts += 1
            head.host = value
        elif name == b"authorization":
            head.authorizations += 1
            head.authorization = value
        elif name == b"content-length" and value.isdigit():
            head.content_length = int(value[:20])
    return head


def _check_size(scope: Scope, head: _Head) -> JSONResponse | None:
    target = len(scope["raw_path"]) + len(scope["query_string"])
    if target > limits.MAX_TARGET_NBYTES:
        message = f"the path has {target} bytes; at most {limits.MAX_TARGET_NBYTES} are read"
        return _refuse(414, "uri_too_long", message, _CLOSE)
    count = len(scope["headers"])
    if count > limits.MAX_HEADERS or head.num_bytes > limits.MAX_HEADERS_NBYTES:
        message = (
            f"the request has {count} headers of {head.num_bytes} bytes; at most {limits.MAX_HEADERS} of "
            f"{limits.MAX_HEADERS_NBYTES} bytes together are read"
        )
        return _refuse(431, "headers_too_large", message, _CLOSE)
    return None


def _check_length(head: _Head) -> JSONResponse | None:
    if head.content_length <= limits.MAX_BODY_NBYTES:
        return None
    return _refuse(413, "body_too_large", limits.BODY_TOO_LARGE, _CLOSE)


def _refuse(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(error_body(message, kind=kind, code=code), status, headers=headers)
