"""Server-sent events (WHATWG HTML, 9.2): one `data:` line for each event."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """An event whose data is `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"
