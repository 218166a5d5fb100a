"""GET /: a chat page for people who look at the server with a browser.

Rule: static files, nothing to build, no other host; the policy below lets the page load itself and talk
to this server, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

_FILES = Path(__file__).parent
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


def _serve(path: str, name: str, media_type: str) -> None:
    content = (_FILES / name).read_bytes()

    @router.get(path, name=name)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)


_serve("/", "index.html", "text/html")
_serve("/console/console.css", "console.css", "text/css")
_serve("/console/console.js", "console.js", "text/javascript")
