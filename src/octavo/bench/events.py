"""Reads streamed answers of OpenAI-compatible servers: server-sent events, and the JSON chunks in them.

Rule: what is read does not depend on how the network cut it. Fields that nobody here needs are skipped,
since servers add their own.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: The data of the event that ends a stream.
DONE = b"[DONE]"


class EventReader:
    """The data of server-sent events (WHATWG HTML, 9.2), from bytes that come in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the data of the events that they complete."""
        events = []
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Delta(msgspec.Struct):
    """What a chunk adds to a message. Servers that tell thinking from answering name it in two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """A chunk's part of one answer: `delta` from the chat route, `text` from completions."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether any of the model's words are in it."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning)


class PromptDetails(msgspec.Struct):
    """What a server says of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The tokens that a server counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the server's cache; 0 where it doesn't say."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


#: Bytes of an event's data to a Chunk; msgspec.DecodeError where they are none.
read_chunk = msgspec.json.Decoder(Chunk).decode


def error_message(error: Any) -> str:
    """The sentence in an error, whichever way a server wraps it; cut to what fits a message."""
    while isinstance(error, dict):
        error = next((error[key] for key in ("error", "message", "detail") if error.get(key)), str(error))
    return str(error)[:400]


def body_message(body: bytes) -> str:
    """The same for the body of an answer that may not even be JSON."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:400].decode(errors="replace").strip()
