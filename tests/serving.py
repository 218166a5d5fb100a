"""Real servers for tests: `octavo serve` in a process of its own, on a free port.

    with serve(model, "--policy", "priority") as server:
        httpx.get(server.url + "/health")

and `serve_here(model, policy="priority")`, a client of an application in this process, there at once.

Also the tiny model that they serve: its context is long, so that a stream left alone goes on for seconds.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import pytest
from starlette.testclient import TestClient

from octavo.config.resolve import resolve
from octavo.engine.build import build_engine
from octavo.server.app import create_app
from tiny_models import NUM_TOKENS, make_llama_gguf

CONTEXT = 65536
#: A logit_bias without <|endoftext|> and <|im_end|>: an answer is as long as it may be.
ENDLESS = {str(NUM_TOKENS - 3): -100, str(NUM_TOKENS - 1): -100}


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose context holds CONTEXT tokens."""
    return make_llama_gguf(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT).path


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def stderr(self) -> str:
        """What it wrote to standard error so far."""
        self.log.seek(0)
        return self.log.read().decode()

    def messages(self) -> list[str]:
        """The lines of these that are for people: no records of requests."""
        return [line for line in self.stderr().splitlines() if not line.startswith("{")]

    def health(self) -> dict[str, object]:
        """The answer of /health."""
        body: dict[str, object] = httpx.get(f"{self.url}/health").raise_for_status().json()
        return body

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no request is under way; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.health()["requests"]:
            assert time.monotonic() < deadline, f"after {seconds} s: {self.health()}"
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """The server's process and the engine's."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")  # of the thread that started it
        children = [int(child) for task in tasks for child in task.read_text().split()]
        assert children, "the engine has no process of its own"
        return [self.process.pid, *children]

    def num_files(self) -> int:
        """Files and sockets that its processes have open."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.processes())

    def rss(self) -> int:
        """Bytes of memory that its processes have in use."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.processes())
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self, number: int = signal.SIGINT, seconds: float = 20) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def serve(model: Path, *flags: str, python: str = sys.executable) -> Iterator[Server]:
    """`octavo serve`, ready to answer."""
    command = [python, "-m", "octavo", "serve", "--port", "0", "--model", str(model)]
    command += ["--threads", "1", *flags]
    if "--kv-cache-gib" not in flags:
        command += ["--kv-cache-gib", "0.25"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        server = Server("", process, log)
        try:
            yield Server(_wait_for_url(server), process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait_for_url(server: Server, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while True:
        match = re.search(r"Ready at (http://\S+)", server.stderr())
        if match:
            return match[1]
        assert server.process.poll() is None, f"the server ended:\n{server.stderr()}"
        assert time.monotonic() < deadline, f"the server is not ready after {seconds} s:\n{server.stderr()}"
        time.sleep(0.05)


@contextmanager
def serve_here(model: Path, **settings: object) -> Iterator[TestClient]:
    """The application in this process. Bugs raise here. At the end, every block is free again."""
    settings = {"model": str(model), "threads": 1, "max_model_len": 1024, **settings}
    app = create_app(build_engine(resolve(settings).config))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client
        engine = client.app.state.engine  # type: ignore[attr-defined]
        assert engine.num_streams == 0
        scheduler = engine._client._core.scheduler
        deadline = time.monotonic() + 5
        while scheduler.has_requests:
            assert time.monotonic() < deadline, "requests are left behind"
            time.sleep(0.01)
        scheduler.check_integrity()
        assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks
