"""How a server starts and stops."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from octavo.config.server import ServerConfig
from octavo.errors import ConfigError
from octavo.server import serving
from serving import ENDLESS, Server, serve

HI = [{"role": "user", "content": "the cat"}]


class Reader(threading.Thread):
    """Reads a stream to its end. `began` is set with the first piece of text."""

    def __init__(self, url: str, max_tokens: int | None) -> None:
        super().__init__()
        self._url = f"{url}/v1/chat/completions"
        self._body: dict[str, Any] = {"messages": HI, "stream": True, "logit_bias": ENDLESS}
        if max_tokens is not None:
            self._body["max_tokens"] = max_tokens
        self.began = threading.Event()
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=30) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line)
                    self.began.set()


@contextmanager
def stuck_client(server: Server) -> Iterator[None]:
    """A client that asks for a long stream and reads none of it."""
    body = {"messages": HI, "stream": True, "logprobs": True, "top_logprobs": 20, "logit_bias": ENDLESS}
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = httpx.Request("POST", f"{server.url}/v1/chat/completions", json=body)
        head = [f"{name}: {value}" for name, value in request.headers.items()]
        lines = ["POST /v1/chat/completions HTTP/1.1", *head, "", ""]
        connection.sendall("\r\n".join(lines).encode() + request.content)
        yield


def test_a_signal_lets_answers_end_and_then_ends_them(tiny_path: Path) -> None:
    with serve(tiny_path, "--drain-seconds", "1") as server, stuck_client(server):
        short, long = Reader(server.url, max_tokens=100), Reader(server.url, max_tokens=None)
        short.began.wait(10)
        long.began.wait(10)
        started = time.monotonic()
        assert server.stop(signal.SIGTERM, seconds=20) == 0
        assert time.monotonic() - started > 1
        short.join(5)
        long.join(5)
        assert '"finish_reason":"length"' in short.events[-2]
        assert '"code":"engine_dead"' in long.events[-2]
        assert short.events[-1] == long.events[-1] == "data: [DONE]"
        assert server.messages()[2:] == [
            "Stopping; open answers have 1 s to end (Ctrl-C again stops at once)"
        ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
def test_while_it_drains(tiny_path: Path, number: int) -> None:
    with serve(tiny_path, "--drain-seconds", "30") as server, httpx.Client(base_url=server.url) as client:
        reader = Reader(server.url, max_tokens=1500)
        reader.began.wait(10)
        assert client.get("/ready").status_code == 200
        server.process.send_signal(number)
        ready = client.get("/ready")  # on the connection that is open, and at once
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI})  # and on a new one
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) > 0
        assert client.get("/health").json()["requests"] == 1
        assert client.get("/v1/models").status_code == 200
        reader.join(30)
        assert '"finish_reason":"length"' in reader.events[-2]
        assert server.process.wait(5) == 0  # it does not wait for the rest of 30 s, nor for `client`


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)],
)
def test_a_second_signal_does_not_wait(tiny_path: Path, first: int, second: int) -> None:
    with serve(tiny_path) as server:
        reader = Reader(server.url, max_tokens=None)
        reader.began.wait(10)
        server.process.send_signal(first)
        time.sleep(0.3)
        assert server.stop(second, seconds=4) == 0
        reader.join(5)
        assert '"code":"engine_dead"' in reader.events[-2]
        assert reader.events[-1] == "data: [DONE]"
        assert "Traceback" not in server.stderr()


def test_nothing_to_drain(tiny_path: Path) -> None:
    with serve(tiny_path, "--drain-seconds", "0") as server, httpx.Client(base_url=server.url) as client:
        client.get("/health")
        assert server.stop(signal.SIGTERM, seconds=4) == 0
        assert "Stopping" not in server.stderr()


def test_a_server_for_everyone_says_so(tiny_path: Path, tmp_path: Path) -> None:
    with serve(tiny_path, "--host", "0.0.0.0") as server:
        (line,) = [line for line in server.stderr().splitlines() if "Warning" in line]
        assert line.startswith("Warning whoever can reach 0.0.0.0 can use this server: it has no --api-key")
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    flags = ("--host", "0.0.0.0", "--api-key-file", str(keys), "--api-workers", "2")
    with serve(tiny_path, *flags) as server:
        assert "Warning" not in server.stderr()
        url = server.url.replace("0.0.0.0", "127.0.0.1") + "/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer sk-1"}).status_code == 200
        assert "sk-1" not in server.stderr()


def test_a_port_that_was_taken_while_the_model_loaded() -> None:
    sockets = [socket.socket() for _ in range(2)]
    try:
        for each in sockets:  # both may bind, as long as neither listens
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", sockets[0].getsockname()[1]))
        sockets[0].listen()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            with pytest.raises(ConfigError, match="--port"):
                serving.run(
                    FastAPI(), sockets[1], ServerConfig(), on_ready=lambda: None, on_drain=lambda _: None
                )
        finally:
            signal.signal(signal.SIGINT, handlers[0])
            signal.signal(signal.SIGTERM, handlers[1])
    finally:
        for each in sockets:
            each.close()
