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


def test_ctrl_c_lets_answers_end_and_then_ends_them(tiny_path: Path) -> None:
    with serve(tiny_path) as server, stuck_client(server):
        short, long = Reader(server.url, max_tokens=500), Reader(server.url, max_tokens=None)
        short.began.wait(10)
        long.began.wait(10)
        assert server.stop(signal.SIGINT, seconds=20) == 0
        short.join(5)
        long.join(5)
        assert '"finish_reason":"length"' in short.events[-2]
        assert '"code":"engine_dead"' in long.events[-2]
        assert short.events[-1] == long.events[-1] == "data: [DONE]"
        lines = server.stderr().splitlines()
        assert lines[2:] == ["Stopping; open answers have 5 s to end (Ctrl-C again stops at once)"]


def test_a_second_ctrl_c_does_not_wait(tiny_path: Path) -> None:
    with serve(tiny_path) as server:
        reader = Reader(server.url, max_tokens=None)
        reader.began.wait(10)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.stop(signal.SIGINT, seconds=3) == 0
        reader.join(5)
        assert '"code":"engine_dead"' in reader.events[-2]
        assert "Traceback" not in server.stderr()


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
