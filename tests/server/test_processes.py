"""The processes behind a server: the engine's and the front ends', and what clients see when one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import ENDLESS, Server, serve

HI = [{"role": "user", "content": "the cat"}]


def children(pid: int, module: str) -> list[int]:
    """Processes that a process started to run a module."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if parent == pid and module.encode() in command:
            found.append(int(path.name))
    return found


def engine_of(server: Server) -> int:
    (pid,) = children(server.process.pid, "octavo.engine")
    return pid


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for a condition; how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - began


def status(server: Server, path: str) -> tuple[int, str]:
    answer = httpx.get(server.url + path, timeout=5)
    return answer.status_code, answer.json()["status"]


def ask(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": HI, "temperature": 0, "max_tokens": 8, "logit_bias": ENDLESS, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)


class Stream(threading.Thread):
    """A stream that goes on until somebody ends it."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/chat/completions"
        self.began = threading.Event()
        self.lines: list[str] = []
        self.start()
        assert self.began.wait(20)

    def run(self) -> None:
        body = {"messages": HI, "stream": True, "logit_bias": ENDLESS}
        with httpx.stream("POST", self._url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self.began.set()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_bug_40_an_engine_that_dies_or_stops(tiny_path: Path, number: signal.Signals, workers: int) -> None:
    """Health and readiness say so within two seconds, streams end with an error, and another one serves."""
    with serve(tiny_path, "--api-workers", str(workers)) as server:
        before = ask(server).json()["choices"]
        streams = [Stream(server) for _ in range(3)]
        os.kill(engine_of(server), number)
        assert until(lambda: status(server, "/health")[0] == 503, 3) < 2
        code, why = status(server, "/ready")
        assert code == 503
        assert "the engine" in why
        refused = ask(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        for stream in streams:
            stream.join(20)
            assert '"code":"engine_dead"' in stream.lines[-2]
            assert stream.lines[-1] == "data: [DONE]"
        until(lambda: status(server, "/ready")[0] == 200, 20)
        until(lambda: ask(server).json().get("choices") == before, 5)  # front ends hear of it one by one
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_no_orphans_when_the_parent_is_killed(tiny_path: Path, workers: int) -> None:
    with serve(tiny_path, "--api-workers", str(workers)) as server:
        pids = [engine_of(server), *children(server.process.pid, "octavo.server.worker")]
        assert len(pids) == (1 if workers == 1 else 1 + workers)
        server.process.kill()
        server.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)


def test_workers_share_an_engine(tiny_path: Path) -> None:
    """Requests of different front ends never mix, and a front end that dies loses its own only."""
    with serve(tiny_path, "--api-workers", "2") as server:
        expected = {n: ask(server, max_tokens=n).json()["choices"] for n in range(4, 24)}
        found: dict[int, Any] = {}

        def answer(n: int) -> None:
            found[n] = ask(server, max_tokens=n).json()["choices"]

        threads = [threading.Thread(target=answer, args=(n,)) for n in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected

        first, second = children(server.process.pid, "octavo.server.worker")
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in children(server.process.pid, "octavo.server.worker"), 5)
        assert ask(server, max_tokens=5).json()["choices"] == expected[5]
        until(lambda: len(children(server.process.pid, "octavo.server.worker")) == 2, 10)
        assert second in children(server.process.pid, "octavo.server.worker")
        assert server.stop(signal.SIGTERM) == 0
