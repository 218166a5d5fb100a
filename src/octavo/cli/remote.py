"""A model behind somebody's OpenAI-compatible server, for commands that take a URL.

Rule: what goes wrong over there is a RemoteServerError that says what to do here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo.config import env
from octavo.errors import ConfigError, RemoteServerError
from octavo.server.hosts import is_loopback

if TYPE_CHECKING:  # they take a while, and `--help` should not wait for them
    import httpx

    from octavo.bench.events import Chunk

_KEY_VARIABLE = "OPENAI_API_KEY"
_CONNECT_SECONDS = 10


def is_url(text: str) -> bool:
    """Whether a model is named by where it is served."""
    return text.startswith(("http://", "https://"))


def base_url(text: str) -> str:
    """The server's URL, without the /v1 that is often given with it; ConfigError if it is none."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{text[:200]!r} is no URL of a server; give one such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def api_key(given: str | None) -> str | None:
    """The key to send: as given, or the environment's."""
    key = given or env.foreign(_KEY_VARIABLE)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header can carry; is it the right text?")
    return key


class RemoteServer:
    """A connection to a server. `close` when done.

    direct: without the proxies of the environment, which are never asked for a server on this machine.
    """

    def __init__(self, url: str, key: str | None = None, *, direct: bool = False) -> None:
        import httpx

        self.url = base_url(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # An answer may begin late, behind a long prompt or a queue: no time limit but for the connection.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        direct = direct or is_loopback(urlsplit(self.url).hostname or "")
        no_proxy = {"http://": None, "https://": None} if direct else None
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, mounts=no_proxy)

    def model(self) -> str:
        """The name of the model that is served, or the first one of several."""
        with self._errors_named():
            response = self._client.get("/v1/models", timeout=_CONNECT_SECONDS)
            self._check(response)
            try:
                name = response.json()["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as error:
                raise RemoteServerError(
                    f"{self.url}/v1/models names no model; name it with --model, if this is the right URL"
                ) from error
        return str(name)

    def chat(self, body: dict[str, Any]) -> Generator[Chunk]:
        """The chunks of a streamed answer, up to its end. Closing the iterator ends the answer there."""
        import msgspec

        from octavo.bench.events import DONE, EventReader, error_message, read_chunk

        events = EventReader()
        with (
            self._errors_named(),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
            self._check(response)
            for data in response.iter_bytes():
                for event in events.feed(data):
                    if event == DONE:
                        return
                    try:
                        chunk = read_chunk(event)
                    except msgspec.DecodeError as error:
                        raise RemoteServerError(
                            f"{self.url} sent what is no chunk of an answer: {event[:200]!r}"
                        ) from error
                    if chunk.error is not None:
                        raise RemoteServerError(f"the server gave up: {error_message(chunk.error)}")
                    yield chunk
            raise RemoteServerError(f"{self.url} ended the answer before it was complete; ask again")

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RemoteServerError(
                f"nothing answers at {self.url} ({error}); is the server running, and is this its URL?"
            ) from error
        except httpx.TimeoutException as error:
            raise RemoteServerError(f"{self.url} does not answer in time; try again later") from error
        except httpx.HTTPError as error:
            raise RemoteServerError(
                f"the connection to {self.url} broke ({error}); does the server still run?"
            ) from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        from octavo.bench.events import body_message

        said = body_message(response.content)
        answer = f"{status}: {said}" if said else str(status)
        raise RemoteServerError(f"{self.url} answers {answer}{_advice(response)}")


def _advice(response: httpx.Response) -> str:
    status = response.status_code
    if status in (401, 403):
        return f". Give the server's key with --api-key or {_KEY_VARIABLE}"
    if status == 404:
        return ". Look at the URL and at the model's name"
    if status in (429, 503):
        after = response.headers.get("retry-after", "")
        return f". Try again in {after} s" if after.isdigit() else ". Try again later"
    return ""
